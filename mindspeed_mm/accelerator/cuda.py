"""NVIDIA GPUs: nccl, torch.cuda."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from mindspeed_mm.accelerator.attention import cuda as flash
from mindspeed_mm.accelerator.attention.kernel import AttentionKernel, PaddedHeads
from mindspeed_mm.accelerator.fused import FusedKernels, LigerKernels
from mindspeed_mm.accelerator.queued import QueuedAccelerator
from mindspeed_mm.utils.extras import has_extra
from mindspeed_mm.utils.launch import this_launch
from mindspeed_mm.utils.log import notice


@functools.cache
def _liger() -> LigerKernels:
    return LigerKernels()


class CUDAAccelerator(QueuedAccelerator):
    """A CUDA device."""

    name = "cuda"
    collective_backend = "nccl"
    sum_dtype = torch.float64
    # part of the product name, dense bf16/fp16 and fp32 peaks in TFLOP/s. Source: NVIDIA's data sheets
    peaks = (
        ("H200", 989.0, 67.0),
        ("H100 PCIe", 756.0, 51.0),
        ("H100", 989.0, 67.0),
        ("H800", 989.0, 67.0),
        ("A100", 312.0, 19.5),
        ("A800", 312.0, 19.5),
        ("L40S", 362.0, 91.6),
        ("RTX 4090", 165.2, 82.6),
        ("V100", 125.0, 15.7),
    )

    attention_packages = MappingProxyType({"flash_attention_2": "flash_attn", "flash_attention_3": flash.FLASH_3})

    def attention_kernel(self, query: torch.Tensor, value: torch.Tensor) -> AttentionKernel:
        if query.dtype in flash.DTYPES and max(query.shape[-1], value.shape[-1]) <= flash.LARGEST_HEAD:
            return PaddedHeads(flash.flash_kernel(), multiple=flash.HEAD_MULTIPLE)
        return super().attention_kernel(query, value)

    def kernels_not_taken(self) -> dict[str, str]:
        found = {"FlashAttention-3": why} if (why := flash.why_not_flash_3()) is not None else {}
        found["FlashAttention of PyTorch"] = f"takes bf16 and fp16 only, and heads of up to {flash.LARGEST_HEAD}"
        return {**found, "npu_fusion_attention": "it runs on Ascend devices"}

    def fused_kernels(self) -> FusedKernels | None:
        return _liger() if has_extra("liger") else None

    def why_no_fused_kernels(self) -> str:
        return "liger-kernel is not installed: pip install 'mindspeed_mm[liger]'"

    def device(self) -> torch.device:
        return torch.device("cuda", this_launch().local_rank % torch.cuda.device_count())

    def set_device(self) -> None:
        torch.cuda.set_device(self.device())

    def model_name(self) -> str:
        return torch.cuda.get_device_name()

    @property
    def library(self) -> Any:
        return torch.cuda

    def memory_allocated(self) -> int:
        return torch.cuda.memory_allocated()

    def total_memory(self) -> int:
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory

    def max_memory_allocated(self) -> int:
        return torch.cuda.max_memory_allocated()

    def rng_state(self) -> dict[str, torch.Tensor]:
        return {**super().rng_state(), "cuda": torch.cuda.get_rng_state()}

    def set_rng_state(self, states: Mapping[str, torch.Tensor]) -> None:
        super().set_rng_state(states)
        if "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"])

    def why_no_float8(self) -> str | None:
        major, minor = torch.cuda.get_device_capability()
        return None if (major, minor) >= (8, 9) else f"{self.model_name()} has compute capability {major}.{minor}"

    def allow_tf32(self) -> None:
        if torch.cuda.get_device_capability() < (8, 0):
            notice(f"--allow-tf32 has no effect here: {self.model_name()} has no TF32; compute capability 8.0 has it")
            return
        # They set `fp32_precision` too; where that alone is set, PyTorch refuses to tell libraries what these are.
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True

    def activities(self) -> list[torch.profiler.ProfilerActivity]:
        return [*super().activities(), torch.profiler.ProfilerActivity.CUDA]

    def record_memory_history(self, stacks: str, max_entries: int | None) -> None:
        torch.cuda.memory._record_memory_history(stacks=stacks, max_entries=max_entries or sys.maxsize)

    def dump_memory_snapshot(self, path: str) -> None:
        torch.cuda.memory._dump_snapshot(path)
        torch.cuda.memory._record_memory_history(enabled=None)
