"""Move the tensors of a batch to the device of the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from mindspeed_mm.utils.dtypes import TORCH_DTYPES, to_torch_dtype

ValueT = TypeVar("ValueT")


def _device_of_torch() -> torch.device:
    seen = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return seen or torch.device("cpu")


def _none_has(device: torch.device) -> bool:
    return False


_default: Callable[[], torch.device] = _device_of_torch
_has_queue: Callable[[torch.device], bool] = _none_has


def use_device(default: Callable[[], torch.device], has_queue: Callable[[torch.device], bool]) -> None:
    """Set the device of this process for `move_to_device`.

    Args:
        default: returns the device of a batch for which none is given.
        has_queue: whether a device's queue keeps the order of copies and their readers: copies are then asynchronous.
    """
    global _default, _has_queue
    _default, _has_queue = default, has_queue


def move_to_device(
    value: ValueT, device: torch.device | torch.dtype | str | None = None, dtype: torch.dtype | str | None = None
) -> ValueT:
    """Return `value` (a tensor, or containers and dataclasses of tensors) on `device`.

    Copies to an accelerator are asynchronous, as its queue keeps the order; a copy to the host is waited for.

    A dict is changed in place as well, so that the published `move_to_device(batch, get_args().params_dtype)` has its
    effect: a dtype, or its name, in the place of the device.

    Args:
        device: None: the device of this process, by MM_DEVICE or else the available one.
        dtype: dtype of floating-point tensors, or its name (bf16, fp16, fp32); None: unchanged.
    """
    if isinstance(device, torch.dtype) or device in TORCH_DTYPES:
        device, dtype = None, device
    return _moved(value, _default() if device is None else torch.device(device), to_torch_dtype(dtype))


def _moved(value: object, device: torch.device, dtype: torch.dtype | None) -> Any:
    if isinstance(value, torch.Tensor):
        as_dtype = dtype if dtype is not None and value.is_floating_point() else None
        return value.to(device, as_dtype, non_blocking=_has_queue(device))
    if isinstance(value, dict):
        for key in value:
            value[key] = _moved(value[key], device, dtype)
        return value
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(v, device, dtype) for v in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        moved = {f.name: _moved(getattr(value, f.name), device, dtype) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **moved)
    return value
