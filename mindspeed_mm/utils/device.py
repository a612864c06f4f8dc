"""Move what a batch holds to where the model computes."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch


def move_to_device(value: Any, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Any:
    """Return `value` (a tensor, or containers and dataclasses of tensors) on `device`, without waiting for the copy.

    Args:
        device: None: the current accelerator, or the host where there is none.
        dtype: of floating-point tensors; None: unchanged.
    """
    if device is None:
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    if isinstance(value, torch.Tensor):
        return value.to(device, dtype if dtype is not None and value.is_floating_point() else None, non_blocking=True)
    if isinstance(value, dict):
        return {k: move_to_device(v, device, dtype) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(move_to_device(v, device, dtype) for v in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        moved = {f.name: move_to_device(getattr(value, f.name), device, dtype) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **moved)
    return value
