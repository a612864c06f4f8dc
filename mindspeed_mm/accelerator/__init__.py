"""The device this process computes on, behind one small interface.

The only package that names device types and collective backends, imports a vendor's package or patches a library's
symbols. Everything else calls `current()`.
"""

from __future__ import annotations

import functools
import os

import torch

from mindspeed_mm.accelerator.base import Accelerator
from mindspeed_mm.utils.device import use_device

__all__ = ["Accelerator", "current", "prepare_megatron", "resolve_backend"]


@functools.cache
def current() -> Accelerator:
    """Return the accelerator of this process: npu, cuda or cpu, in this order of preference.

    `MM_DEVICE=cpu|cuda|npu` in the environment overrides the choice.
    """
    from mindspeed_mm.accelerator.cpu import CPUAccelerator
    from mindspeed_mm.utils.errors import ConfigError

    wanted = os.environ.get("MM_DEVICE", "").strip().lower()
    if wanted not in ("", "cpu", "cuda", "npu"):
        raise ConfigError(f"environment variable MM_DEVICE is '{wanted}'; expected cpu, cuda or npu")
    if wanted in ("", "npu") and hasattr(torch, "npu") and torch.npu.is_available():
        from mindspeed_mm.accelerator.npu import NPUAccelerator

        return NPUAccelerator()
    if wanted in ("", "cuda") and torch.cuda.is_available():
        from mindspeed_mm.accelerator.cuda import CUDAAccelerator

        return CUDAAccelerator()
    if wanted in ("cuda", "npu"):
        raise ConfigError(
            f"environment variable MM_DEVICE is '{wanted}', but torch sees no {wanted} device; "
            "unset it or set MM_DEVICE=cpu"
        )
    return CPUAccelerator()


def prepare_megatron() -> None:
    """Prepare this process for megatron-core on its device, before the first import of megatron.

    On Ascend MindSpeed's adaptor is imported, on the host `torch.cuda` gets CPU meanings, CUDA needs nothing; then,
    where Transformer Engine is missing, what megatron-core lacks without it is patched.

    Raises:
        ConfigError: megatron was imported before, or MindSpeed is not installed on Ascend.
    """
    from mindspeed_mm.accelerator.megatron_compat import apply_compatibility

    current().prepare_megatron()
    apply_compatibility()


def resolve_backend(requested: str | None, needs_cpu_tensors: bool = False) -> str:
    """Return the collective backend string for `init_process_group`.

    Args:
        requested: `--distributed-backend` as given (nccl, gloo, hccl, "npu:hccl,cpu:gloo", …) or None.
        needs_cpu_tensors: whether collectives on host tensors will happen (offload, host counters).

    A backend that this machine's device can't use becomes the device's own, with one notice.
    """
    return current().resolve_backend(requested, needs_cpu_tensors)


use_device(lambda: current().device(), lambda value, device, dtype: current().copied(value, device, dtype))
