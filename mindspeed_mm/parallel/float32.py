"""What stays in float32 in a 16-bit model: parameters that the model's own library keeps so, and inputs of blocks.

transformers keeps the routers of some mixtures of experts in float32, diffusers the embedding of timesteps and the
modulation tables and norms of Wan. FSDP casts whole units, so such a module becomes a unit of its own, unless it has no
matrix: then it isn't worth a collective, and a break of a compiled block, and its parameters stay whole.

FSDP also casts each floating-point input of a unit. Models compute the rotary tables of their encoders, positions and
masks in float32 and pass them to their blocks so; casts would round what the model itself doesn't.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from mindspeed_mm.parallel.patterns import join_paths


class KeptInFloat32(NamedTuple):
    """The parts of a model that stay in float32.

    Attributes:
        units: path → module all of whose parameters stay in float32, the outermost ones.
        loose: name → any other parameter that stays in float32.
    """

    units: dict[str, nn.Module]
    loose: dict[str, nn.Parameter]

    def only_matrices_in_units(self) -> KeptInFloat32:
        """Return the same with the parameters of modules without a matrix, as norms are, among the loose ones."""
        small = {path: unit for path, unit in self.units.items() if all(p.dim() < 2 for p in unit.parameters())}
        of_small = {join_paths(path, name): p for path, unit in small.items() for name, p in unit.named_parameters()}
        units = {path: unit for path, unit in self.units.items() if path not in small}
        return KeptInFloat32(units, {**self.loose, **of_small})


def find_kept(root: nn.Module, is_kept: Callable[[str], bool]) -> KeptInFloat32:
    """Find the modules and parameters of `root` that stay in float32.

    Args:
        is_kept: name of a parameter → whether the model's library keeps it in float32.
    """
    kept = {id(p) for name, p in root.named_parameters(remove_duplicate=False) if is_kept(name)}
    found = KeptInFloat32({}, {})

    def visit(path: str, module: nn.Module) -> None:
        parameters = list(module.parameters())
        runs = not isinstance(module, (nn.ModuleList, nn.ModuleDict)) and module is not root
        if runs and parameters and all(id(p) in kept for p in parameters):
            found.units[path] = module
            return
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in kept:
                found.loose[join_paths(path, name)] = parameter
        for name, child in module.named_children():
            visit(join_paths(path, name), child)

    if kept:
        visit("", root)
    return found


def leave_whole(kept: KeptInFloat32, device: torch.device) -> set[nn.Parameter]:
    """Move the loose parameters to `device`, unless they are on meta, and return them: FSDP is to ignore them.

    They stay whole on every rank; the backend sums their gradients over ranks once a step.
    """
    for parameter in kept.loose.values():
        if not parameter.is_meta:
            parameter.data = parameter.data.to(device)
    return set(kept.loose.values())


def cast_hidden_states(block: nn.Module, dtype: torch.dtype) -> None:
    """Let a block of transformers cast its hidden states to `dtype`, and nothing else that it is called with.

    They are its first argument, or the one of that name. They already are of `dtype` unless a buffer, which FSDP
    leaves in float32, has been added to them.
    """

    def cast(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (_cast(args[0], dtype), *args[1:]), kwargs
        return args, {name: _cast(v, dtype) if name == "hidden_states" else v for name, v in kwargs.items()}

    block.register_forward_pre_hook(cast, with_kwargs=True)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
