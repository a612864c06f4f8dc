"""The device this process computes on, behind one small interface.

The only room that names device types and collective backends, imports a vendor's package or patches a
foreign symbol. Everything else asks `current()`.
"""

from __future__ import annotations

import functools
import os

import torch

from mindspeed_mm.accelerator.base import Accelerator

__all__ = ["Accelerator", "current", "resolve_backend"]


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


def resolve_backend(requested: str | None, needs_cpu_tensors: bool = False) -> str:
    """Return the collective backend string for `init_process_group`.

    Args:
        requested: `--distributed-backend` as given (nccl, gloo, hccl, "npu:hccl,cpu:gloo", …) or None.
        needs_cpu_tensors: whether collectives on host tensors will happen (offload, host counters).

    A backend that this machine's device can't use becomes the device's own, with one notice.
    """
    return current().resolve_backend(requested, needs_cpu_tensors)
