"""Units of fully_shard: the modules that are sharded together, their order, and a check for calls that bypass them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.log import notice


def whole_units(root: nn.Module, ignored: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the modules to wrap, by path, so that `ignored` modules compute in the dtype of the others.

    A list of modules has no forward method, so its elements are wrapped. A module elsewhere that has a parameter of an
    ignored one (a tied embedding) is wrapped too. A module with parameters of several dtypes, for example a quantised
    one, is not wrapped: it chooses its compute dtype itself.
    """
    units: dict[str, nn.Module] = {}

    def add(path: str, module: nn.Module) -> None:
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            for name, child in module.named_children():
                add(f"{path}.{name}", child)
        elif len({p.dtype for p in module.parameters()}) == 1:
            units[path] = module

    for path, module in ignored.items():
        add(path, module)
    params = {id(p) for module in units.values() for p in module.parameters()}
    inside = {id(m) for module in units.values() for m in module.modules()}
    for path, module in root.named_modules():
        if id(module) not in inside and any(id(p) in params for p in module._parameters.values()):
            units[path] = module
    return units


def group_into_units(root: nn.Module, modules: Mapping[str, nn.Module]) -> list[tuple[nn.Module, ...]]:
    """Group `modules` into units, with tied modules in one unit, ordered so that children come before parents."""
    paths = {id(m): path for path, m in modules.items() if m is not root}
    unit_of = _nearest_listed(root, paths)
    groups: dict[int, list[nn.Module]] = {id(m): [m] for m in modules.values() if id(m) in paths}
    for owners in _shared_parameter_owners(root):
        # an owner inside of no listed module would be part of the root's unit: it joins the unit of the others
        tied = {id(unit_of[id(o)] or o): unit_of[id(o)] or o for o in owners}
        if len(tied) == 1 or all(unit_of[id(o)] is None for o in owners):
            continue
        merged: list[nn.Module] = []
        for key, module in tied.items():
            merged.extend(m for m in groups.get(key, [module]) if m not in merged)
        for module in merged:
            groups[id(module)] = merged
        names = [n for n, m in root.named_modules() if m in merged]
        notice(f"{' and '.join(repr(n) for n in names)} share a tied weight: they are sharded together as one unit")
    units: list[tuple[nn.Module, ...]] = []
    done: set[int] = set()
    for module in reversed([m for m in _post_order(root) if id(m) in groups]):
        # at the position of its last member, so that modules nested in any member are wrapped before
        if id(module) not in done:
            units.append(tuple(groups[id(module)]))
            done.update(id(m) for m in groups[id(module)])
    return units[::-1]


def _shared_parameter_owners(root: nn.Module) -> list[list[nn.Module]]:
    owners: dict[int, list[nn.Module]] = {}
    for module in root.modules():
        for param in module._parameters.values():
            if param is not None:
                owners.setdefault(id(param), []).append(module)
    return [modules for modules in owners.values() if len(modules) > 1]


def _nearest_listed(root: nn.Module, listed: Mapping[int, str]) -> dict[int, nn.Module | None]:
    """Return, for every module, the innermost listed module that is or contains it; None: only the root does."""
    nearest: dict[int, nn.Module | None] = {}

    def visit(module: nn.Module, current: nn.Module | None) -> None:
        current = module if id(module) in listed else current
        nearest.setdefault(id(module), current)
        for child in module.children():
            visit(child, current)

    visit(root, None)
    return nearest


def _post_order(module: nn.Module, seen: set[int] | None = None) -> Iterable[nn.Module]:
    seen = set() if seen is None else seen
    for child in module.children():
        if id(child) not in seen:
            yield from _post_order(child, seen)
    if id(module) not in seen:
        seen.add(id(module))
        yield module


def refuse_calls_inside(root: nn.Module, modules: Mapping[str, nn.Module], whole: Mapping[str, nn.Module]) -> None:
    """During the first forward of `root`, raise an error if a unit's child is called from outside of the unit.

    The unit's parameters are not gathered in such a call, and torch's error message names no module.
    """
    handles: list[RemovableHandle] = []

    def watch(unit: str, path: str, child: nn.Module) -> None:
        def check(module: nn.Module, args: tuple[object, ...]) -> None:
            if any(is_sharded(p) for p in module._parameters.values()):
                raise ConfigError(
                    f"fsdp2.yaml: '{path}' is called by the model while '{unit}', the unit that holds its parameters, "
                    f"is not running; add '{path}' to {'ignored_modules' if unit in whole else 'sub_modules_to_wrap'}"
                )

        handles.append(child.register_forward_pre_hook(check))

    nearest = _nearest_listed(root, {id(m): path for path, m in modules.items()})
    names = {id(m): path for path, m in modules.items()}
    for path, child in root.named_modules():
        unit = nearest[id(child)]
        if unit is not None and unit is not child and child._parameters:
            watch(names[id(unit)], path, child)
    if handles:
        handles.append(root.register_forward_hook(lambda *_: _remove(handles)))


def is_sharded(parameter: nn.Parameter | None) -> bool:
    """Whether fully_shard has not gathered a parameter; a gathered one may still be a part of a whole one.

    Such parts, of tensor and of expert parallelism, are DTensors on a mesh without fully_shard's dimensions.
    """
    if not isinstance(parameter, DTensor):
        return False
    return not set(parameter.device_mesh.mesh_dim_names or ("shard",)) <= {"tensor", "experts"}


def _remove(handles: Iterable[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
