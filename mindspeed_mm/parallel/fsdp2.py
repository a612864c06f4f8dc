"""Apply torch's fully_shard to an unmodified model according to fsdp2.yaml: children first, root last."""

from __future__ import annotations

import re
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
from mindspeed_mm.parallel.float32 import KeptInFloat32, cast_hidden_states, leave_whole
from mindspeed_mm.parallel.meshes import ParameterMeshes
from mindspeed_mm.parallel.patterns import containing_path, join_paths
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
    """Arguments of `fully_shard`: policies that all units share, and the mesh of each unit.

    Attributes:
        meshes: the mesh of each unit, by its path.
        ignored_params: parameters that are not sharded.
        whole_units: ignored modules that are wrapped only for the dtype casts of the other units: see
            `units.whole_units`.
        float32_units: modules that compute in float32 whatever the others do: see `find_kept`.
        casts_hidden_states_only: units inside of the model take inputs other than hidden states as they are: see
            `cast_hidden_states`.
    """

    meshes: ParameterMeshes
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    reshard_after_forward: bool | int | None
    ignored_params: set[nn.Parameter] = field(default_factory=set)
    whole_units: dict[str, nn.Module] = field(default_factory=dict)
    float32_units: dict[str, nn.Module] = field(default_factory=dict)
    casts_hidden_states_only: bool = False

    @property
    def casts(self) -> bool:
        """Whether units compute, or return their outputs, in another dtype than float32."""
        return bool({self.mp_policy.param_dtype, self.mp_policy.output_dtype} - {None, torch.float32})

    @property
    def has_an_effect(self) -> bool:
        """Whether fully_shard has any effect; on one rank without casts and offload it has none."""
        reduces = self.mp_policy.reduce_dtype not in (None, torch.float32)
        return self.meshes.span_ranks or self.casts or reduces or isinstance(self.offload_policy, CPUOffloadPolicy)

    def keep_whole(self, units: dict[str, nn.Module], mesh: DeviceMesh) -> None:
        """Wrap `units`, from `units.whole_units`, over `mesh` of this rank alone: they are cast, but not sharded."""
        self.whole_units = units
        self.meshes = self.meshes.with_special(units, mesh)

    def keep_in_float32(self, kept: KeptInFloat32, device: torch.device) -> None:
        """Let what `find_kept` has found compute in float32: modules as units of their own, other parameters whole.

        Modules without a matrix are whole, too. With parameters in host memory they are units, and parameters that are
        in no such module are cast as the others: whole ones would have to be on the device.
        """
        if kept.units or kept.loose:
            names = ", ".join(sorted({re.sub(r"\.\d+(?=\.)", ".{*}", name) for name in (*kept.units, *kept.loose)}))
            notice(f"kept in float32, as the model's library keeps it: {names}")
        if isinstance(self.offload_policy, CPUOffloadPolicy):
            self.float32_units = kept.units
            if kept.loose:
                notice(f"fsdp2.yaml: offload_to_cpu: cast to param_dtype as all others: {', '.join(kept.loose)}")
            return
        kept = kept.only_matrices_in_units()
        self.float32_units = kept.units
        self.ignored_params |= leave_whole(kept, device)

    def override(self, arguments: Mapping[str, Any]) -> None:
        """Replace arguments that fsdp2.yaml sets with the caller's arguments of fully_shard.

        Raises:
            TypeError: an argument differs from unit to unit, or fully_shard has no such argument.
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
        """Return the arguments of fully_shard for units on the common mesh."""
        return {
            "mesh": self.meshes.common,
            "mp_policy": self.mp_policy,
            "offload_policy": self.offload_policy,
            "reshard_after_forward": self.reshard_after_forward,
            "ignored_params": self.ignored_params or None,
        }

    def kwargs_of(self, path: str) -> ShardArguments:
        """Return the arguments of fully_shard for the unit at `path`."""
        kwargs = self.kwargs()
        kwargs["mesh"] = self.meshes.of(path)
        if path in self.float32_units:
            kwargs["mp_policy"] = replace(
                self.mp_policy, param_dtype=None, output_dtype=None, cast_forward_inputs=False
            )
        if containing_path(path, self.whole_units) is not None:
            # on a mesh of one rank there is nothing to free, and no parameter of the unit is ignored
            kwargs["reshard_after_forward"], kwargs["ignored_params"] = False, None
        return kwargs


def build_shard_plan(config: Fsdp2Config, meshes: ParameterMeshes, ignored_params: set[nn.Parameter]) -> ShardPlan:
    """Convert fsdp2.yaml to fully_shard's policies.

    If the file sets no reduce_dtype, gradients of 16-bit compute are summed in float32: over ranks and, if their
    reduction waits for the step's last micro-batch, over micro-batches.

    Raises:
        ConfigError: reshard_after_forward is an int that doesn't divide the shard group's size.
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
        # the ends of the range equal the two booleans: keep the gathered parameters, or reshard over the whole group
        return value == shard_size
    if value < 1 or shard_size % value:
        valid = [n for n in range(2, shard_size + 1) if shard_size % n == 0]
        raise ConfigError(
            f"fsdp2.yaml: reshard_after_forward is {value}, which does not divide the sharding size {shard_size}; "
            f"valid here: true, false, {', '.join(map(str, valid))}"
        )
    return value


def ignored_parameters(modules: Mapping[str, nn.Module], device: torch.device) -> set[nn.Parameter]:
    """Return the parameters of `modules`, which are not sharded, moved to `device` unless they are on meta.

    FSDP doesn't reduce their gradients; the backend sums them over ranks once a step.
    """
    params: set[nn.Parameter] = set()
    for module in modules.values():
        if not any(t.is_meta for t in (*module.parameters(), *module.buffers())):
            module.to(device)
        params.update(module.parameters())
    return params


def wrap_modules(root: nn.Module, modules: Mapping[str, nn.Module], plan: ShardPlan, at: str = "") -> None:
    """Call fully_shard on each of `modules`, children before parents, then on `root`; skipped if it has no effect.

    Modules inside of `root` that are units already stay as they are. Modules that share a parameter (tied embedding and
    head) become one unit: in separate units, the second one would lose the tensor that the first one sharded.

    Args:
        modules: path in `root` → module.
        at: path of `root` in the model; the paths of `plan` are relative to the model.
    """
    if not plan.has_an_effect:
        return
    # transformers' outputs contain views (features of each image); torch warns of in-place changes, and there are none
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
    inside = {id(m) for whole in plan.whole_units.values() for m in whole.modules()}
    modules = {**{path: m for path, m in modules.items() if id(m) not in inside}, **plan.whole_units}
    modules |= {path: m for path, m in _within(at, plan.float32_units).items() if m is not root}
    done = {path: m for path, m in root.named_modules() if isinstance(m, FSDPModule) and m is not root}
    modules = {path: m for path, m in modules.items() if not isinstance(m, FSDPModule)}
    # a module with several paths goes by the one in the plan
    paths = {id(m): join_paths(at, path) for path, m in root.named_modules()}
    paths |= {id(m): path for path, m in plan.whole_units.items()}
    for unit in group_into_units(root, modules):
        target: Any = unit[0] if len(unit) == 1 else list(unit)
        kwargs, policy = plan.kwargs_of(paths[id(unit[0])]), plan.mp_policy
        if plan.casts_hidden_states_only and kwargs["mp_policy"].cast_forward_inputs and policy.param_dtype is not None:
            kwargs["mp_policy"] = replace(policy, cast_forward_inputs=False)
            for block in unit:
                cast_hidden_states(block, policy.param_dtype)
        fully_shard(target, **kwargs)
    refuse_calls_inside(root, {**done, **modules}, plan.whole_units)
    if not isinstance(root, FSDPModule):
        kwargs = plan.kwargs_of(at)
        if kwargs["reshard_after_forward"] is True:
            # backward starts with the root's own parameters (the head): freed after forward, they were gathered twice
            kwargs["reshard_after_forward"] = None
        fully_shard(root, **kwargs)


def _within(at: str, modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return those of `modules` that are inside of the module at `at`, by their paths in it."""
    prefix = f"{at}." if at else ""
    return {path.removeprefix(prefix): m for path, m in modules.items() if path.startswith(prefix)}


def use_summed_gradients(root: nn.Module) -> None:
    """Let every unit on several ranks reduce gradients with plain sums instead of means.

    A step divides its sum of losses once by the global number of target tokens, so a mean over ranks would have to be
    undone. Plain sums also work with gloo, which has no pre-multiplied sum. Units on one rank are unchanged: they have
    nothing to sum, and setting a factor would cost a division.
    """
    for unit in sharded_units(root):
        if any(isinstance(p, DTensor) and p.device_mesh.size() > 1 for p in unit.parameters()):
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)


def sharded_units(root: nn.Module) -> list[FSDPModule]:
    """Return the modules that fully_shard was called on, including `root`."""
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def set_gradient_sync(units: Iterable[FSDPModule], is_last: bool, defer: bool) -> None:
    """Set the gradient reduction after the next backward pass of a step with several micro-batches.

    Args:
        units: the units of the model, from `sharded_units`.
        is_last: whether this is the step's last micro-batch.
        defer: keep unsharded gradients until the last micro-batch (less communication, more memory). False:
            reduce-scatter after every micro-batch, and defer only HSDP's all-reduce over replicas.
    """
    for unit in units:
        if defer:
            unit.set_requires_gradient_sync(is_last, recurse=False)
        else:
            unit.set_requires_all_reduce(is_last, recurse=False)
        unit.set_is_last_backward(is_last)
