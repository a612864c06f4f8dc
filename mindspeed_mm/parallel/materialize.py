"""Materialisation of models on the meta device, with random values that do not depend on the layout."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from mindspeed_mm.utils.adapter_names import stored_name
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.seeds import seeded


def has_meta_tensors(module: nn.Module) -> bool:
    """Whether any parameter or buffer of `module` is on the meta device."""
    return any(t.is_meta for t in (*module.parameters(), *module.buffers()))


def materialize(root: nn.Module, param_device: torch.device, buffer_device: torch.device) -> None:
    """Allocate storage for every meta parameter and buffer of `root`; a tied parameter stays one parameter.

    Parameters are uninitialised. Buffers are filled with NaN, so that those that an init function doesn't set can be
    detected. Buffers that already have storage keep their values.

    Args:
        param_device: device of the parameters (the host with offload).
        buffer_device: device of the buffers (always the compute device).
    """
    replaced: dict[int, tuple[torch.Tensor, nn.Parameter]] = {}
    for module in root.modules():
        for name, param in module._parameters.items():
            if param is None or not param.is_meta:
                continue
            if id(param) not in replaced:
                empty = nn.Parameter(torch.empty_like(param, device=param_device), requires_grad=param.requires_grad)
                replaced[id(param)] = (param, empty)  # keeps the old one alive, so that its id is not reused
            module._parameters[name] = replaced[id(param)][1]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                has_nan = buffer.is_floating_point() or buffer.is_complex()
                make = functools.partial(torch.full_like, fill_value=torch.nan) if has_nan else torch.empty_like
                module._buffers[name] = make(buffer, device=buffer_device)
            elif buffer is not None:
                module._buffers[name] = buffer.to(buffer_device)


@torch.no_grad()
def copy_whole(target: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy this rank's part of the tensor `whole` into `target`; all of it if `target` is no DTensor."""
    if not isinstance(target, DTensor):
        target.copy_(whole)
        return
    shape, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
    part = whole
    for dim, (length, start) in enumerate(zip(shape, offset, strict=True)):
        part = part.narrow(dim, start if length else 0, length)
    target.to_local().copy_(part)


def initialize_from_names(
    root: nn.Module,
    init_function: Callable[[nn.Module, str], Callable[[nn.Module], None]],
    seed: int,
    *,
    storage_is_empty: bool,
    buffers_only: bool = False,
    unfilled_buffers_are_fine: bool = False,
) -> None:
    """Initialise every parameter of `root` with random values that depend only on `seed` and the module's name.

    The tensors of each module are created whole in host memory and initialised with a generator seeded from (seed,
    module name); each rank keeps its part. So one process and any layout of many processes get the same values.
    (Initialising sharded tensors in place would give every rank the same shard.)

    Args:
        init_function: (module, its name) → the function that initialises the module's own tensors in place.
        storage_is_empty: the tensors were materialised from meta, without the values of their constructors.
        buffers_only: leave parameters unchanged, as a checkpoint or a HF directory will be loaded.
        unfilled_buffers_are_fine: buffers that the init functions don't set (they are NaN) will be set later.

    Raises:
        ConfigError: an init function doesn't set a tensor with empty storage.
    """
    done: set[int] = set()
    for name, module in root.named_modules():
        own = {n: p for n, p in module._parameters.items() if p is not None and id(p) not in done}
        buffers = {n: b for n, b in module._buffers.items() if b is not None}
        if not buffers and (buffers_only or not own):
            continue
        done.update(id(p) for p in own.values())
        with _whole_tensors(module, own, buffers, storage_is_empty, keep_parameters=buffers_only) as tensors:
            with seeded(seed, stored_name(name)):
                init_function(module, name)(module)
            untouched = [n for n, t in tensors() if storage_is_empty and bool(torch.isnan(t).any())]
        if buffers_only:
            # parameters and persistent buffers will be loaded
            untouched = [n for n in untouched if n in module._non_persistent_buffers_set]
        if unfilled_buffers_are_fine:
            untouched = [n for n in untouched if n in own]
        if untouched:
            raise _untouched(module, f"{name}.{untouched[0]}")


@torch.no_grad()
def draw_own_parameters(
    module: nn.Module, name: str, initialize: Callable[[nn.Module], None], seed: int
) -> dict[str, torch.Tensor]:
    """Return the values that `initialize_from_names` gives a module's own parameters: whole, in host memory.

    Args:
        module: may be on the meta device; it is not changed.
        name: name of the module in its model.
        initialize: initialises the module's own tensors in place.

    Raises:
        ConfigError: `initialize` doesn't set a parameter.
    """
    own = {n: p for n, p in module._parameters.items() if p is not None}
    with _whole_tensors(module, own, {}, storage_is_empty=True, keep_parameters=True) as tensors:
        with seeded(seed, name):
            initialize(module)
        values = {n: t.detach() for n, t in tensors()}
    untouched = [n for n, value in values.items() if bool(torch.isnan(value).any())]
    if untouched:
        raise _untouched(module, f"{name}.{untouched[0]}")
    return values


def _untouched(module: nn.Module, name: str) -> ConfigError:
    return ConfigError(
        f"'{name}' ({type(module).__name__}) is given no value by the model's weight initialisation; override "
        "_init_weights for it, or build without --init-model-with-meta-device"
    )


@contextmanager
def _whole_tensors(
    module: nn.Module,
    own: dict[str, nn.Parameter],
    buffers: dict[str, torch.Tensor],
    storage_is_empty: bool,
    *,
    keep_parameters: bool,
) -> Iterator[Callable[[], list[tuple[str, torch.Tensor]]]]:
    """Replace `module`'s own tensors with whole host copies inside the context; copy them back at its end.

    Copies of uninitialised parameters are filled with NaN, so that those that an init function doesn't set can be
    detected.
    """
    for name, param in own.items():
        if storage_is_empty or isinstance(param, DTensor):
            value = torch.full(param.shape, torch.nan, dtype=param.dtype)
        else:
            value = param.detach().cpu().clone()
        module._parameters[name] = nn.Parameter(value, requires_grad=param.requires_grad)
    host_buffers = {name: b.detach().cpu().clone() for name, b in buffers.items()}
    module._buffers.update(host_buffers)
    try:
        yield lambda: [
            (n, t) for n, t in (*module._parameters.items(), *module._buffers.items()) if n in own or n in buffers
        ]
        for name, param in own.items():
            if not keep_parameters:
                copy_whole(param, module._parameters[name].detach())
        for name, buffer in buffers.items():
            buffer.copy_(host_buffers[name])
    finally:
        module._parameters.update(own)
        module._buffers.update(buffers)
