"""Ascend NPUs: hccl, torch_npu, and MindSpeed's adaptor where it is installed."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from mindspeed_mm.accelerator.attention.kernel import AttentionKernel, PaddedHeads
from mindspeed_mm.accelerator.attention.npu import NPUFusionAttention
from mindspeed_mm.accelerator.fused import FusedKernels, NPUFusedKernels
from mindspeed_mm.accelerator.queued import QueuedAccelerator
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.launch import this_launch
from mindspeed_mm.utils.log import notice


@functools.cache
def _kernels() -> NPUFusedKernels:
    return NPUFusedKernels()


class NPUAccelerator(QueuedAccelerator):
    """An Ascend device; torch_npu is imported here and nowhere else."""

    name = "npu"
    collective_backend = "hccl"
    # part of the product name, dense fp16/bf16 and fp32 peaks in TFLOP/s. Source: Huawei's Atlas 800T A2 data sheet
    peaks = (("910B", 376.0, 94.0),)

    # transformers maps it to torch_npu's own fused operator
    attention_packages = MappingProxyType({"flash_attention_2": None})

    def __init__(self) -> None:
        import torch_npu

        self._npu = torch_npu.npu
        if importlib.util.find_spec("mindspeed") is None:
            notice("mindspeed is not installed: its fused NPU operators are not used (see pyproject.toml, extra npu)")

    def attention_kernel(self, query: torch.Tensor, value: torch.Tensor) -> AttentionKernel:
        return PaddedHeads(NPUFusionAttention())

    def kernels_not_taken(self) -> dict[str, str]:
        return {"FlashAttention-2, FlashAttention-3": "they run on CUDA"}

    def fused_kernels(self) -> FusedKernels | None:
        return _kernels()

    def device(self) -> torch.device:
        return torch.device("npu", this_launch().local_rank % self._npu.device_count())

    def set_device(self) -> None:
        self._npu.set_device(self.device())

    def model_name(self) -> str:
        return self._npu.get_device_name()

    @property
    def library(self) -> Any:
        return self._npu

    def memory_allocated(self) -> int:
        return self._npu.memory_allocated()

    def total_memory(self) -> int:
        return self._npu.get_device_properties(self._npu.current_device()).total_memory

    def max_memory_allocated(self) -> int:
        return self._npu.max_memory_allocated()

    def rng_state(self) -> dict[str, torch.Tensor]:
        return {**super().rng_state(), "npu": self._npu.get_rng_state()}

    def set_rng_state(self, states: Mapping[str, torch.Tensor]) -> None:
        super().set_rng_state(states)
        if "npu" in states:
            self._npu.set_rng_state(states["npu"])

    def prepare_megatron(self) -> None:
        if importlib.util.find_spec("mindspeed") is None:
            raise ConfigError(
                "megatron-core needs MindSpeed on an Ascend device, and it is not installed: see constraints-npu.txt"
            )
        import mindspeed.megatron_adaptor  # noqa: F401

    def allow_tf32(self) -> None:
        self._npu.matmul.allow_hf32 = True
        self._npu.conv.allow_hf32 = True

    def supports_fused_optimizers(self) -> bool:
        # torch_npu 2.14 lists a kernel for AdamW; whether it honours grad_scale and found_inf is not known
        return False

    def record_memory_history(self, stacks: str, max_entries: int | None) -> None:
        self._npu.memory._record_memory_history(stacks=stacks, max_entries=max_entries or sys.maxsize)

    def dump_memory_snapshot(self, path: str) -> None:
        self._npu.memory._dump_snapshot(path)
        self._npu.memory._record_memory_history(enabled=None)
