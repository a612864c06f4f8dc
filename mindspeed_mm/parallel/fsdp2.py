"""Apply torch's fully_shard to an unmodified model, as an fsdp2.yaml says: children first, root last."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from mindspeed_mm import accelerator
from mindspeed_mm.configs.fsdp2_config import Fsdp2Config
from mindspeed_mm.parallel.meshes import ParameterMeshes
from mindspeed_mm.parallel.patterns import holding_path, join_paths
from mindspeed_mm.parallel.units import group_into_units, refuse_calls_inside
from mindspeed_mm.utils.dtypes import to_torch_dtype
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.log import notice


class ShardArguments(TypedDict):
    """Keyword arguments of `torch.distributed.fsdp.fully_shard`."""

    mesh: DeviceMesh
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    reshard_after_forward: bool | int | None
    ignored_params: set[nn.Parameter] | None


@dataclass
class ShardPlan:
    """What `fully_shard` is called with: policies that every unit has, and the mesh of each.

    Attributes:
        meshes: asked by the path of a unit.
        ignored_params: parameters that stay whole on every rank.
        whole_units: ignored modules that are cast as every other unit is: see `units.whole_units`.
    """

    meshes: ParameterMeshes
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    reshard_after_forward: bool | int | None
    ignored_params: set[nn.Parameter] = field(default_factory=set)
    whole_units: dict[str, nn.Module] = field(default_factory=dict)

    @property
    def casts(self) -> bool:
        """Whether units compute, or hand on what they have computed, in another dtype than float32."""
        return bool({self.mp_policy.param_dtype, self.mp_policy.output_dtype} - {None, torch.float32})

    @property
    def has_an_effect(self) -> bool:
        """Whether fully_shard would do anything: one rank without casts and offload computes the same without it."""
        reduces = self.mp_policy.reduce_dtype not in (None, torch.float32)
        return self.meshes.span_ranks or self.casts or reduces or isinstance(self.offload_policy, CPUOffloadPolicy)

    def keep_whole(self, units: dict[str, nn.Module], mesh: DeviceMesh) -> None:
        """Shard `units`, of `units.whole_units`, over `mesh`, which has this rank alone: they are cast and whole."""
        self.whole_units = units
        self.meshes = self.meshes.with_special(units, mesh)

    def override(self, arguments: Mapping[str, Any]) -> None:
        """Let a caller's arguments of fully_shard take the place of those that fsdp2.yaml asks for.

        Raises:
            TypeError: fully_shard's arguments that differ from unit to unit, or names that it doesn't have.
        """
        for name, value in arguments.items():
            if name == "mesh":
                self.meshes = replace(self.meshes, common=value)
            elif name == "ignored_params":
                self.ignored_params = value or set()
            elif name in ShardArguments.__annotations__:
                setattr(self, name, value)
            else:
                raise TypeError(
                    f"'{name}' is no argument that every unit of fully_shard has; these are "
                    f"{', '.join(ShardArguments.__annotations__)}"
                )

    def kwargs(self) -> ShardArguments:
        """Arguments of fully_shard for units on the common mesh."""
        return {
            "mesh": self.meshes.common,
            "mp_policy": self.mp_policy,
            "offload_policy": self.offload_policy,
            "reshard_after_forward": self.reshard_after_forward,
            "ignored_params": self.ignored_params or None,
        }

    def kwargs_of(self, path: str) -> ShardArguments:
        """Arguments of fully_shard for the unit at `path`."""
        kwargs = self.kwargs()
        kwargs["mesh"] = self.meshes.of(path)
        if holding_path(path, self.whole_units) is not None:
            # over this rank alone there is nothing to free, and nothing in the unit is ignored
            kwargs["reshard_after_forward"], kwargs["ignored_params"] = False, None
        return kwargs


def build_shard_plan(config: Fsdp2Config, meshes: ParameterMeshes, ignored_params: set[nn.Parameter]) -> ShardPlan:
    """Translate fsdp2.yaml into fully_shard's policies.

    Where the file names no reduce_dtype, gradients that are computed in 16 bits are summed in float32, over ranks and,
    where they wait for the step's last micro-batch, over micro-batches.

    Raises:
        ConfigError: reshard_after_forward is an int that is no proper divisor of the shard group's size.
    """
    param_dtype, reduce_dtype = to_torch_dtype(config.param_dtype), to_torch_dtype(config.reduce_dtype)
    if reduce_dtype is None and param_dtype in (torch.bfloat16, torch.float16):
        reduce_dtype = torch.float32
    mp_policy = MixedPrecisionPolicy(
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        output_dtype=to_torch_dtype(config.output_dtype),
        cast_forward_inputs=config.cast_forward_inputs,
    )
    offload: OffloadPolicy = OffloadPolicy()
    if config.offload_to_cpu:
        pin = config.pin_memory and not accelerator.current().is_host
        if config.pin_memory and not pin:
            notice("fsdp2.yaml: pin_memory has no effect here: there is no accelerator to copy to")
        offload = CPUOffloadPolicy(pin_memory=pin)
    reshard = _reshard(config.reshard_after_forward, meshes.common)
    return ShardPlan(meshes, mp_policy, offload, reshard, ignored_params)


def _reshard(value: bool | int, mesh: DeviceMesh) -> bool | int:
    if isinstance(value, bool):
        return value
    shard_size = mesh.size(mesh.ndim - 1)
    if value in (1, shard_size):
        # the ends of the range are the two booleans: keep the whole, or free down to this rank's shard
        return value == shard_size
    if value < 1 or shard_size % value:
        valid = [n for n in range(2, shard_size + 1) if shard_size % n == 0]
        raise ConfigError(
            f"fsdp2.yaml: reshard_after_forward is {value}, which does not divide the sharding size {shard_size}; "
            f"valid here: true, false, {', '.join(map(str, valid))}"
        )
    return value


def ignored_parameters(modules: Mapping[str, nn.Module], device: torch.device) -> set[nn.Parameter]:
    """Return the parameters of `modules`, which stay whole on every rank, moved to `device` unless they are on meta.

    FSDP leaves their gradients alone; the backend sums them over ranks once a step.
    """
    params: set[nn.Parameter] = set()
    for module in modules.values():
        if not any(t.is_meta for t in (*module.parameters(), *module.buffers())):
            module.to(device)
        params.update(module.parameters())
    return params


def wrap_modules(root: nn.Module, modules: Mapping[str, nn.Module], plan: ShardPlan, at: str = "") -> None:
    """Call fully_shard on each of `modules`, children before parents, then on `root`; not at all if in vain.

    Modules that share a parameter (tied embeddings and head) become one unit: apart, the second one would be left
    without the tensor that the first one sharded.

    Args:
        modules: path in `root` → module.
        at: path of `root` in the model that paths of `plan` are relative to.
    """
    if not plan.has_an_effect:
        return
    # transformers outputs carry views (features of each image); torch warns of in-place use, and there is none
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
    inside = {id(m) for whole in plan.whole_units.values() for m in whole.modules()}
    modules = {**{path: m for path, m in modules.items() if id(m) not in inside}, **plan.whole_units}
    # a module that stands at several paths goes by the one that the plan has for it
    paths = {id(m): join_paths(at, path) for path, m in root.named_modules()}
    paths |= {id(m): path for path, m in plan.whole_units.items()}
    for unit in group_into_units(root, modules):
        target: Any = unit[0] if len(unit) == 1 else list(unit)
        fully_shard(target, **plan.kwargs_of(paths[id(unit[0])]))
    refuse_calls_inside(root, modules, plan.whole_units)
    if not isinstance(root, FSDPModule):
        kwargs = plan.kwargs_of(at)
        if kwargs["reshard_after_forward"] is True:
            # backward starts with the root's own parameters (the head): freeing them after forward would gather twice
            kwargs["reshard_after_forward"] = None
        fully_shard(root, **kwargs)


def use_summed_gradients(root: nn.Module) -> None:
    """Make every unit that has several ranks reduce gradients by plain sums, not means, whoever made it a unit.

    The loss of a step is a sum over target tokens divided once by their global number, so a mean over ranks would
    have to be undone. Plain sums also run on gloo, which has no pre-multiplied sum. On one rank nothing is summed, and
    a factor would cost a division.
    """
    for unit in sharded_units(root):
        if any(isinstance(p, DTensor) and p.device_mesh.size() > 1 for p in unit.parameters()):
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)


def sharded_units(root: nn.Module) -> list[FSDPModule]:
    """The modules that fully_shard was called on, `root` among them."""
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def set_gradient_sync(units: Iterable[FSDPModule], is_last: bool, defer: bool) -> None:
    """Say what happens to gradients after the next backward of a step with several micro-batches.

    Args:
        units: of the wrapped model, as `sharded_units` lists them.
        is_last: whether this is the step's last micro-batch.
        defer: keep whole gradients on every rank until then (less communication, more memory). Otherwise gradients
            are reduce-scattered every time and only HSDP's all-reduce over replicas waits.
    """
    for unit in units:
        if defer:
            unit.set_requires_gradient_sync(is_last, recurse=False)
        else:
            unit.set_requires_all_reduce(is_last, recurse=False)
        unit.set_is_last_backward(is_last)
