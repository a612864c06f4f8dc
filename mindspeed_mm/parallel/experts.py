"""Expert parallelism: each rank keeps some of the experts of a layer, and tokens travel to their experts and back.

transformers exchanges the tokens: `apply_expert_parallelism` splits the parameters of an experts module over a mesh and
replaces the module's forward method with two all-to-alls around it. The gradients of an expert are then whole for the
tokens of all ranks among which its layer is split, and `fully_shard` sums them over the ranks that have the same
experts. Gradients of tokens and routing weights return through the all-to-alls. No factor is needed anywhere.

Each rank's experts are sharded further along dim 1, and A of their adapters along dim 2, over the ranks that have the
same experts. Along dim 0 both meshes would split the same dim, and parts of a parameter would no longer be rectangles
in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import version
from importlib.util import find_spec

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from mindspeed_mm.configs.dims import Dims
from mindspeed_mm.configs.parallel_checks import expert_rows_over_shards, experts_over_ranks
from mindspeed_mm.configs.sections import raise_all
from mindspeed_mm.parallel.fsdp2 import ShardPlan
from mindspeed_mm.parallel.meshes import Meshes, own_mesh
from mindspeed_mm.parallel.patterns import containing_path, join_paths
from mindspeed_mm.utils.adapter_names import is_adapter, stored_name
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.log import notice

#: the way to exchange tokens, of transformers' `EPImplementationInterface`
DISPATCH = "all_to_all"


def find_experts(root: nn.Module) -> dict[str, nn.Module]:
    """Return the experts modules of `root` that transformers can split over ranks, by path.

    They have the attribute `_is_expert_parallel`, which transformers' decorator `use_experts_implementation` sets.
    """
    return {path: module for path, module in root.named_modules() if "_is_expert_parallel" in vars(module)}


def plan_experts(
    root: nn.Module, named: Mapping[str, nn.Module] | None, ignored: Iterable[str], dims: Dims, file: str
) -> dict[str, nn.Module]:
    """Return the experts modules to split over ranks, by path; the model may be on the meta device.

    Of experts with LoRA adapters, it is PEFT's layer around them, which holds both.

    Args:
        root: the model.
        named: modules that `moe_modules` names, by path; None: all experts modules.
        ignored: paths of the modules that `ignored_modules` names.
        dims: sizes of the parallelisms.
        file: name of fsdp2.yaml, for messages.

    Raises:
        ConfigError: there are no experts to split, sizes don't divide, or transformers is too old to split them.
    """
    if find_spec("transformers.distributed.expert_parallel") is None:
        raise ConfigError(
            f"expert_parallel_size is {dims.ep}, but transformers {version('transformers')} can't split experts over "
            f"ranks; install the release that constraints.txt names, or write 1 in {file}, or leave out "
            "--expert-model-parallel-size"
        )
    found = {(path := stored_name(inner)): root.get_submodule(path) for inner in find_experts(root)}
    if not found:
        raise ConfigError(
            f"expert_parallel_size is {dims.ep}, but {type(root).__name__} has no experts that transformers can split "
            f"over ranks (a module with its decorator use_experts_implementation); write 1 in {file}, or leave out "
            "--expert-model-parallel-size"
        )
    experts = found
    if named is None:
        notice(
            f"{file} names no moe_modules; the experts of all {len(found)} layers that have some are split over ranks: "
            f"{_shown(found)}"
        )
    else:
        experts = {path: module for path, module in found.items() if containing_path(path, named) is not None}
        for path in named:
            if not any(containing_path(expert, [path]) is not None for expert in found):
                raise ConfigError(
                    f"{file}: moe_modules names '{path}', which is a {type(named[path]).__name__} without experts "
                    f"that transformers can split over ranks; {type(root).__name__} has {_shown(found)}"
                )
    for path in ignored:
        for expert in experts:
            if containing_path(expert, [path]) is not None or containing_path(path, [expert]) is not None:
                raise ConfigError(
                    f"{file}: ignored_modules keeps '{path}' whole on every rank, but expert_parallel_size {dims.ep} "
                    f"splits '{expert}'; remove it from ignored_modules, or leave it out of moe_modules"
                )
    for path, module in experts.items():
        _check_sizes(path, module, dims)
    return experts


def _check_sizes(path: str, module: nn.Module, dims: Dims) -> None:
    experts = _inner(module)[1]
    own = {id(param): name for name, param in experts.named_parameters(recurse=False)}
    for long_name, param in module.named_parameters():
        name, is_of_adapter = stored_name(long_name), is_adapter(long_name)
        if is_of_adapter and param.dim() != 3:
            raise ConfigError(
                f"expert_parallel_size is {dims.ep}, but '{path}.{name}' {list(param.shape)} is of the adapters of a "
                "parameter of two dimensions, which are shared by all experts; leave it out of "
                "--lora-target-parameters, or write 1"
            )
        if not is_of_adapter and (id(param) not in own or param.dim() < 2):
            raise ConfigError(
                f"expert_parallel_size is {dims.ep}, but '{path}.{name}' {list(param.shape)} is shared by all experts "
                f"of {type(experts).__name__}, which transformers can't split over ranks; write 1"
            )
        dim = _sharded_dim(long_name)
        raise_all(experts_over_ranks(f"'{path}'", param.shape[0], dims))
        raise_all(expert_rows_over_shards(f"dim {dim} of '{path}.{name}' {list(param.shape)}", param.shape[dim], dims))


def _inner(module: nn.Module) -> tuple[str, nn.Module]:
    """Return the experts module inside of PEFT's layers around it, which may be none, with its path in `module`."""
    ((path, experts),) = find_experts(module).items()
    return path, experts


def _sharded_dim(name: str) -> int:
    """Return the dim of a parameter of experts that is sharded further: of A [experts, rank, in] not the rank."""
    return 2 if "lora_A" in name else 1


def _shown(paths: Iterable[str]) -> str:
    shown = [f"'{path}'" for path in paths]
    return ", ".join(shown[:3]) + (f", … '{list(paths)[-1]}'" if len(shown) > 3 else "")


def split_experts(root: nn.Module, experts: Mapping[str, nn.Module], meshes: Meshes) -> None:
    """Split `experts` over `meshes.experts`, in place; parameters keep their `requires_grad`.

    A parameter [experts, rows, columns], of adapters too, becomes a DTensor with the placement Shard(0).

    Args:
        root: the model; it may be on the meta device.
        experts: modules of `root`, from `plan_experts`.
        meshes: device meshes of the run.
    """
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    assert meshes.experts is not None
    styles: dict[str, str] = {}
    for path, module in experts.items():
        styles |= {f"{path}.{name}": "grouped_gemm" for name, _ in module.named_parameters()}
        # after its parameters: it takes the number of experts of this rank
        styles[join_paths(path, _inner(module)[0])] = "ep_dispatch_experts"
    same_tokens = own_mesh(meshes.parameters) if meshes.tensor is None else meshes.tensor
    apply_expert_parallelism(root, meshes.experts, same_tokens, styles, DISPATCH)


def shard_experts(experts: Mapping[str, nn.Module], plan: ShardPlan, mesh: DeviceMesh) -> None:
    """Make each of `experts` a unit of fully_shard over `mesh`, sharded along dim 1; skipped if it has no effect.

    Inputs keep their dtype, as they do without expert parallelism, where experts are a part of their layer's unit:
    routing weights may be float32 in a layer that computes in bfloat16.

    Args:
        experts: from `plan_experts`.
        plan: arguments of fully_shard; it is told the mesh of the experts.
        mesh: `Meshes.expert_shards`.
    """
    plan.meshes = plan.meshes.with_special(experts, mesh)
    if not plan.has_an_effect:
        return
    for path, module in experts.items():
        kwargs = plan.kwargs_of(path)
        policy = kwargs["mp_policy"]
        kwargs["mp_policy"] = MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype, cast_forward_inputs=False)
        # a number of ranks that the parameters are resharded over is one for the mesh of the other units
        kwargs["reshard_after_forward"] = kwargs["reshard_after_forward"] is not False
        dims = {id(param): _sharded_dim(name) for name, param in module.named_parameters()}
        fully_shard(module, **kwargs, shard_placement_fn=lambda parameter, dims=dims: Shard(dims[id(parameter)]))
