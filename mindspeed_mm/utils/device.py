"""Move the tensors of a batch to the device of the model."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from mindspeed_mm.utils.dtypes import TORCH_DTYPES, to_torch_dtype

ValueT = TypeVar("ValueT")


def _device_of_torch() -> torch.device:
    seen = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return seen or torch.device("cpu")


def _copied(value: torch.Tensor, device: torch.device, dtype: torch.dtype | None) -> torch.Tensor:
    return value.to(device, dtype)


_default: Callable[[], torch.device] = _device_of_torch
_copy: Callable[[torch.Tensor, torch.device, torch.dtype | None], torch.Tensor] = _copied


def use_device(
    default: Callable[[], torch.device],
    copy: Callable[[torch.Tensor, torch.device, torch.dtype | None], torch.Tensor],
) -> None:
    """Set the device of this process for `move_to_device`.

    Args:
        default: returns the device of a batch for which none is given.
        copy: returns a tensor on a device, in a dtype (None: its own).
    """
    global _default, _copy
    _default, _copy = default, copy


class OnHost:
    """A value that stays in host memory when the batch that holds it is moved."""

    def __init__(self, value: Any) -> None:
        self.value = value


def host_value(value: Any) -> Any:
    """Return what an `OnHost` holds; any other value as it is."""
    return value.value if isinstance(value, OnHost) else value


def move_to_device(
    value: ValueT, device: torch.device | torch.dtype | str | None = None, dtype: torch.dtype | str | None = None
) -> ValueT:
    """Return `value` (a tensor, or containers and dataclasses of tensors) on `device`; `OnHost` values stay.

    Copies to an accelerator are asynchronous, from pinned memory, as its queue keeps the order; a copy to the host is
    waited for.

    A dict is changed in place as well, so that the published `move_to_device(batch, get_args().params_dtype)` has its
    effect: a dtype, or its name, in the place of the device.

    Args:
        device: None: the device of this process, by MM_DEVICE or else the available one.
        dtype: dtype of floating-point tensors, or its name (bf16, fp16, fp32); None: unchanged.
    """
    if isinstance(device, torch.dtype) or device in TORCH_DTYPES:
        device, dtype = None, device
    return _moved(value, _default() if device is None else torch.device(device), to_torch_dtype(dtype))


class AsynchronousCopies(TorchFunctionMode):
    """Meanwhile `tensor.to(device)` of whatever code copies to the device as `move_to_device` does."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """See the class."""
        kwargs = kwargs or {}
        if func is torch.Tensor.to:
            where = kwargs.get("device", args[1] if len(args) > 1 else None)
            if isinstance(where, (str, torch.device)) and len(args) <= 2 and kwargs.keys() <= {"device"}:
                return move_to_device(args[0], where)
        return func(*args, **kwargs)


def _moved(value: object, device: torch.device, dtype: torch.dtype | None) -> Any:
    if isinstance(value, torch.Tensor):
        return _copy(value, device, dtype if dtype is not None and value.is_floating_point() else None)
    if isinstance(value, dict):
        for key in value:
            value[key] = _moved(value[key], device, dtype)
        return value
    if isinstance(value, (list, tuple)):
        return type(value)([_moved(v, device, dtype) for v in value])
    if hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        held = vars(value).items()
        moved = {name: new for name, old in held if old is not None and (new := _moved(old, device, dtype)) is not old}
        if moved:
            value = copy.copy(value)  # not `replace`, which asks for every field: some have twenty
            vars(value).update(moved)
    return value


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors of `value`, as `move_to_device` finds them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(inner)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for f in dataclasses.fields(value):
            yield from tensors_in(getattr(value, f.name))
