"""Move what a batch holds to where the model computes."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from mindspeed_mm.utils.dtypes import DTYPE_NAMES, to_torch_dtype


def move_to_device(
    value: Any, device: torch.device | torch.dtype | str | None = None, dtype: torch.dtype | str | None = None
) -> Any:
    """Return `value` (a tensor, or containers and dataclasses of tensors) on `device`, without waiting for the copy.

    A dict is changed in place as well, so that the published `move_to_device(batch, get_args().params_dtype)` has its
    effect: a dtype, or its name, in the place of the device.

    Args:
        device: None: the current accelerator, or the host where there is none.
        dtype: of floating-point tensors, or its name (bf16, fp16, fp32); None: unchanged.
    """
    if isinstance(device, torch.dtype) or device in DTYPE_NAMES:
        device, dtype = None, device
    if device is None:
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    return _moved(value, device, to_torch_dtype(dtype))


def _moved(value: Any, device: Any, dtype: torch.dtype | None) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, dtype if dtype is not None and value.is_floating_point() else None, non_blocking=True)
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
