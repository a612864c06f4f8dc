"""FSDP2Mixin, which shards any nn.Module as fsdp2.yaml states, and WeightInitMixin, which initialises its weights."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from mindspeed_mm import accelerator
from mindspeed_mm.configs.dims import Dims
from mindspeed_mm.configs.fsdp2_config import Fsdp2Config
from mindspeed_mm.configs.parallel_model import log_idle_parallel_keys
from mindspeed_mm.models.common.block_recompute import recompute_by_flags
from mindspeed_mm.models.common.build_context import current_build_context, fsdp2_config
from mindspeed_mm.models.common.compiled import modules_to_compile, refuse_own_compile
from mindspeed_mm.models.common.diffusers_init import DiffusersInitMixin, is_diffusers_class
from mindspeed_mm.models.common.float8 import convert_to_float8, float8_layers, refuse_own_float8
from mindspeed_mm.models.common.media import towers_with_split_media
from mindspeed_mm.models.common.memory_layers import MemoryModules, chunk_plan, plan_memory, run_mlps_on_parts
from mindspeed_mm.models.common.paths import check_paths, listed_modules
from mindspeed_mm.models.common.precision import keep_precision
from mindspeed_mm.models.common.sharding_layout import file_dims, layout_of
from mindspeed_mm.models.common.sharding_outline import ShardingOutline
from mindspeed_mm.models.common.tensor_layers import plan_sequence_regions, plan_tensor_layers
from mindspeed_mm.models.contract import as_trainable
from mindspeed_mm.models.transformers.inferred import default_wrap_list, guard_idle_encoders, traits_of
from mindspeed_mm.parallel import fsdp2
from mindspeed_mm.parallel.apply import MODEL_STEPS, WRAPPING_STEPS, ParallelRequest, apply_parallelisms
from mindspeed_mm.parallel.chunk_mbs import apply_chunks
from mindspeed_mm.parallel.compile import apply_compile
from mindspeed_mm.parallel.experts import plan_experts, shard_experts, split_experts
from mindspeed_mm.parallel.materialize import has_meta_tensors, initialize_from_names, materialize
from mindspeed_mm.parallel.meshes import Meshes, ParameterMeshes, own_mesh
from mindspeed_mm.parallel.offload import apply_offload
from mindspeed_mm.parallel.prefetch import PrefetchRecorder
from mindspeed_mm.parallel.recompute import BlockRecompute, apply_recompute
from mindspeed_mm.parallel.tensor import apply_tensor_parallel
from mindspeed_mm.parallel.tensor_plan import TensorSplit
from mindspeed_mm.parallel.tensor_sequence import SequenceRegions
from mindspeed_mm.parallel.units import whole_units
from mindspeed_mm.parallel.world import World
from mindspeed_mm.utils.adapter_names import is_adapter
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.log import notice


class SplitsTokens(Protocol):
    """Splits the tokens of a model's rows over ranks; `parallel/context.py` has one for language models."""

    def install(self, world: World) -> None:
        """Change the model; called before it is wrapped."""


class FSDP2Mixin:
    """Adds `fully_shard(process_group, fsdp2_config_path)` to a model.

    The steps may be overridden one by one: `_pre_fully_shard` reads the file and builds mesh and policies,
    `_fully_shard` applies recompute, wrapping and prefetch, `_post_fully_shard` gives a model built on meta its storage
    and values. `parallel/apply.py` holds the order of what is applied; each step there calls a method of this class,
    which may be overridden by itself. Paths in the file are relative to the object itself.

    Attributes:
        fsdp2_config: the file's content, after `_pre_fully_shard`.
        device_mesh: the mesh that parameters are sharded over.
        fsdp2_overrides: values that replace the file's; to be set before `fully_shard`.
        weights_come_later: whether weights are loaded after sharding, so that no random ones are drawn.
        context_parallel: splits the tokens of rows over ranks; None: nothing states how the model's tokens are split.
    """

    context_parallel: SplitsTokens | None = None
    fsdp2_config: Fsdp2Config | None = None
    device_mesh: Any = None
    weights_come_later: bool = False
    fsdp2_overrides: Mapping[str, Any] = MappingProxyType({})
    _fsdp2_plan: fsdp2.ShardPlan | None = None
    _dims: Dims = Dims()
    _meshes: Meshes | None = None
    _experts: Mapping[str, nn.Module] = MappingProxyType({})

    def freeze(self, config: Any) -> None:
        """Hook: freeze parts of the model as model.json states. By default nothing is frozen."""

    def post_meta_init(self) -> None:
        """Hook: called after a model built on meta has been given its values."""

    def fully_shard(self, process_group: dist.ProcessGroup | None = None, fsdp2_config_path: str | None = None) -> bool:
        """Shard this model over `process_group` as the YAML file at `fsdp2_config_path` states.

        Args:
            process_group: the data-parallel group; None: all ranks.
            fsdp2_config_path: None: defaults (one unit, replicated parameters).

        Returns:
            True: nothing is left for the caller to do.
        """
        fsdp2_kwargs, config = self._pre_fully_shard(process_group, fsdp2_config_path)
        apply_parallelisms(self, self._request(fsdp2_kwargs), MODEL_STEPS)
        self._fully_shard(fsdp2_kwargs, config)
        self._post_fully_shard()
        return True

    def plan_sharding(self, world_size: int, fsdp2_config_path: str | None = None) -> ShardingOutline:
        """Return how `fully_shard` would shard the model on `world_size` ranks, without a process group or values.

        Raises:
            ConfigError: a path matches no module, or sizes don't fit the number of ranks.
        """
        config = fsdp2_config(fsdp2_config_path)
        config = config.model_copy(update=dict(self.fsdp2_overrides))
        module = self._module()
        check_paths(module, config, self._keys_with_paths())
        dims = current_build_context().dims or file_dims(world_size, config)
        dims = dims.with_sharding(config.sharding_size, config.file)
        experts = self._planned_experts(config, dims)
        float8_layers(module, config, dims)
        split = self._planned_tensor(config, dims)[0] if dims.tp > 1 else None
        if dims.cp > 1 and type(self).set_context_parallel is FSDP2Mixin.set_context_parallel:
            self._require_context_parallel(dims.cp)
        memory = self._memory_modules(config, dims)
        patterns = config.sub_modules_to_wrap
        if patterns is None and as_trainable(module).is_transformers:
            patterns = default_wrap_list(module, traits_of(module))

        def found(key: str, entries: list[str] | None = None) -> tuple[str, ...]:
            return tuple(listed_modules(module, config, key, entries))

        return ShardingOutline(
            dims,
            units=found("sub_modules_to_wrap", patterns),
            recomputed=tuple(memory.recomputed),
            ignored=found("ignored_modules"),
            experts=tuple(experts),
            columns=tuple(split.columns) if split is not None else (),
            rows=tuple(split.rows) if split is not None else (),
            towers=tuple(towers_with_split_media(module, traits_of(module).towers, config)) if dims.cp > 1 else (),
            offloaded=tuple(memory.offloaded),
            chunked=tuple(memory.chunked),
            kept=memory.kept,
            chunked_mlps=tuple(memory.chunked_mlps),
            compiled=tuple(modules_to_compile(module, config)),
        )

    def _request(self, fsdp2_kwargs: Mapping[str, Any] | None) -> ParallelRequest:
        """
        Raises:
            ConfigError: the run splits layers or experts, and the class built no meshes for them.
        """
        dims = current_build_context().dims
        if self._meshes is None and dims is not None and (dims.tp > 1 or dims.ep > 1):
            raise ConfigError(
                f"{type(self).__name__} has a _pre_fully_shard of its own, which builds no meshes for tensor-parallel "
                f"size {dims.tp} and expert-parallel size {dims.ep}; call super()._pre_fully_shard, or set both to 1"
            )
        config = self.fsdp2_config or Fsdp2Config()
        asked = {"float8": config.float8_recipe is not None, "compiled": bool(config.compile)}
        return ParallelRequest(self._dims, current_build_context().recompute, fsdp2_kwargs or {}, **asked)

    def _pre_fully_shard(
        self, process_group: dist.ProcessGroup | None, fsdp2_config_path: str | None
    ) -> tuple[dict[str, Any], Fsdp2Config]:
        config = fsdp2_config(fsdp2_config_path)
        config = config.model_copy(update=dict(self.fsdp2_overrides))
        if config.num_to_forward_prefetch is None:  # on the host, gathering and computing share the cores
            config = config.model_copy(update={"num_to_forward_prefetch": 0 if accelerator.current().is_host else 1})
        self.fsdp2_config = config
        check_paths(self._module(), config, self._keys_with_paths())
        self._dims, self._meshes = layout_of(process_group, config)
        self.device_mesh = self._meshes.parameters
        self._experts = self._planned_experts(config, self._dims)
        ignored = listed_modules(self._module(), config, "ignored_modules")
        ignored_params = fsdp2.ignored_parameters(ignored, accelerator.current().device())
        meshes = ParameterMeshes(self.device_mesh)
        plan = self._fsdp2_plan = fsdp2.build_shard_plan(config, meshes, ignored_params)
        if ignored and plan.casts:
            plan.keep_whole(whole_units(self._module(), ignored), own_mesh(meshes.common))
        keep_precision(self._module(), plan)
        return {**plan.kwargs()}, config

    def _keys_with_paths(self) -> list[str]:
        """Return the keys of fsdp2.yaml whose paths are checked here; an overridden step checks its own."""
        keys, own = ["ignored_modules"], type(self)
        if own._fully_shard is FSDP2Mixin._fully_shard:
            if own.set_recompute_modules_to_wrap is FSDP2Mixin.set_recompute_modules_to_wrap:
                keys.append("recompute_modules")
            if own.set_fullyshard_modules_to_wrap is FSDP2Mixin.set_fullyshard_modules_to_wrap:
                keys.append("sub_modules_to_wrap")
        return keys

    def _fully_shard(self, fsdp2_kwargs: dict[str, Any] | None = None, fsdp2_config: Fsdp2Config | None = None) -> None:
        apply_parallelisms(self, self._request(fsdp2_kwargs), WRAPPING_STEPS)

    def _post_fully_shard(self) -> None:
        module = self._module()
        config = self.fsdp2_config or Fsdp2Config()
        current = accelerator.current()
        device = current.device()
        if has_meta_tensors(module):
            materialize(module, torch.device("cpu") if config.offload_to_cpu else device, device)
            self.draw_weights(storage_is_empty=True, buffers_only=self.weights_come_later)
            self.post_meta_init()
        elif not current.is_host and not config.offload_to_cpu:
            module.to(device)

    def draw_weights(self, *, storage_is_empty: bool, buffers_only: bool = False) -> None:
        """Initialise every parameter with random values that depend on the run's seed and its name, not on the layout.

        Args:
            storage_is_empty: whether the model was materialised from meta.
            buffers_only: whether only buffers (rotary tables) are initialised, because a checkpoint has the parameters.
        """
        initialize_from_names(
            self._module(),
            functools.partial(init_function, self._module()),
            current_build_context().seed,
            storage_is_empty=storage_is_empty,
            buffers_only=buffers_only,
            unfilled_buffers_are_fine=type(self).post_meta_init is not FSDP2Mixin.post_meta_init,
        )

    def set_tensor_parallel(self) -> None:
        """Split layers over the tensor-parallel ranks, those that fsdp2.yaml names or those that the family states.

        Only called with --tensor-model-parallel-size above 1.
        """
        assert self._meshes is not None and self._meshes.tensor is not None
        split, regions = self._planned_tensor(self.fsdp2_config or Fsdp2Config(), self._dims)
        apply_tensor_parallel(self._module(), split, self._meshes.tensor, regions)

    def _planned_tensor(self, config: Fsdp2Config, dims: Dims) -> tuple[TensorSplit, SequenceRegions | None]:
        module, traits = self._module(), traits_of(self._module())
        split = plan_tensor_layers(module, traits, config, dims)
        cuts = current_build_context().sequence_parallel
        return split, plan_sequence_regions(module, traits, split) if cuts else None

    def set_float8(self) -> None:
        """Let linear layers multiply in float8, as fsdp2.yaml's float8_recipe says; only called if it has one."""
        convert_to_float8(self._module(), self.fsdp2_config or Fsdp2Config(), self._dims)

    def set_expert_parallel(self, **fsdp2_kwargs: Any) -> None:
        """Split experts over ranks and shard each rank's part further, as units of fully_shard of their own.

        Only called if experts are split, for a class with a `_fully_shard` of its own, too. The experts are those that
        fsdp2.yaml's `moe_modules` names, or all that transformers can split; `fsdp2_kwargs` override single policies.
        """
        plan, meshes = self._fsdp2_plan, self._meshes
        assert plan is not None and meshes is not None and meshes.expert_shards is not None
        plan.override(fsdp2_kwargs)
        split_experts(self._module(), self._experts, meshes)
        shard_experts(self._experts, plan, meshes.expert_shards)

    def _planned_experts(self, config: Fsdp2Config, dims: Dims) -> dict[str, nn.Module]:
        log_idle_parallel_keys(dims, config)
        if not dims.splits_experts:
            return {}
        module = self._module()
        named = None if config.moe_modules is None else listed_modules(module, config, "moe_modules")
        ignored = listed_modules(module, config, "ignored_modules")
        return plan_experts(module, named, ignored, dims, config.file)

    def set_compile(self) -> None:
        """Compile the computation of the modules that fsdp2.yaml's `compile` names; only called if it does."""
        config, module = self.fsdp2_config or Fsdp2Config(), self._module()
        apply_compile(module, modules_to_compile(module, config), config.compile_backend, f"{config.file}: compile")

    def set_chunk_mlp(self) -> None:
        """Run MLPs on parts of the tokens; also called for a class that overrides `_fully_shard`."""
        run_mlps_on_parts(self._module(), self.fsdp2_config or Fsdp2Config(), current_build_context())

    def apply_recompute(self, blocks: BlockRecompute) -> None:
        """Recompute blocks in backward as the flags state, unless fsdp2.yaml has `recompute_modules`.

        Called only with --recompute-granularity, also for a class that overrides `_fully_shard`.
        """
        recompute_by_flags(self._module(), self.fsdp2_config or Fsdp2Config(), blocks)

    def set_context_parallel(self) -> None:
        """Split the tokens of rows over the context-parallel ranks; only called if there are several.

        Raises:
            ConfigError: nothing states how the tokens of this model are split.
        """
        world = current_build_context().world
        assert world is not None, "context parallelism is part of a run"
        self._require_context_parallel(world.context.size).install(world)

    def _require_context_parallel(self, size: int) -> SplitsTokens:
        if self.context_parallel is None:
            raise ConfigError(
                f"--context-parallel-size {size}: nothing states how the tokens of {type(self).__name__} are split "
                "over ranks, as TransformersModel does for language models of transformers; set it to 1, or override "
                "set_context_parallel()"
            )
        return self.context_parallel

    def set_recompute_modules_to_wrap(
        self,
        module: nn.Module | None = None,
        recompute_modules: list[str] | None = None,
        use_reentrant: bool | None = None,
    ) -> None:
        """Recompute the activations of modules in backward; arguments default to this model and its fsdp2.yaml."""
        config = self.fsdp2_config or Fsdp2Config()
        root = module if module is not None else self._module()
        patterns = recompute_modules if recompute_modules is not None else config.recompute_modules
        found = listed_modules(root, config, "recompute_modules", patterns or ())
        reentrant = config.use_reentrant if use_reentrant is None else use_reentrant
        apply_recompute(found, reentrant, config.recompute_keep)

    def set_activation_offload(self) -> None:
        """Keep what the modules that fsdp2.yaml names save for backward in host memory until then."""
        apply_offload(self._memory_modules(self.fsdp2_config or Fsdp2Config(), self._dims).offloaded)

    def set_chunk_mbs(self) -> None:
        """Run the modules that fsdp2.yaml names on chunks of a micro-batch."""
        config = self.fsdp2_config or Fsdp2Config()
        apply_chunks(self._memory_modules(config, self._dims).chunked, chunk_plan(config))

    def _memory_modules(self, config: Fsdp2Config, dims: Dims) -> MemoryModules:
        return plan_memory(self._module(), config, dims, current_build_context())

    def set_fullyshard_modules_to_wrap(
        self, module: nn.Module | None = None, sub_modules_to_wrap: list[str] | None = None, **fsdp2_kwargs: Any
    ) -> None:
        """Make each named module a unit of fully_shard, children first, then the model itself.

        Arguments default to this model and its fsdp2.yaml; `fsdp2_kwargs` override single policies. A transformers
        model for which neither names modules (not even an empty list) is wrapped by its blocks, with a notice.
        """
        if self._fsdp2_plan is None:
            self._pre_fully_shard(None, None)
        plan = self._fsdp2_plan
        assert plan is not None
        plan.override(fsdp2_kwargs)
        config = self.fsdp2_config or Fsdp2Config()
        root = module if module is not None else self._module()
        patterns = sub_modules_to_wrap if sub_modules_to_wrap is not None else config.sub_modules_to_wrap
        traits = traits_of(root)
        if patterns is None and plan.has_an_effect and as_trainable(root).is_transformers:
            patterns = default_wrap_list(root, traits)
            notice(
                f"fsdp2.yaml names no sub_modules_to_wrap; taken for {type(root).__name__}: {json.dumps(patterns)} "
                "(to copy; [] leaves the model in one unit)"
            )
        units = listed_modules(root, config, "sub_modules_to_wrap", patterns or ())
        at = next((path for path, m in self._module().named_modules() if m is root), "")
        fsdp2.wrap_modules(root, units, plan, at)
        fsdp2.use_summed_gradients(root)
        guard_idle_encoders(root, traits)

    def set_modules_to_prefetch(
        self, num_to_forward_prefetch: int | None = None, num_to_backward_prefetch: int | None = None
    ) -> None:
        """Prefetch units in the order in which the first forward runs them; counts default to fsdp2.yaml's."""
        config = self.fsdp2_config or Fsdp2Config()
        forward = config.num_to_forward_prefetch if num_to_forward_prefetch is None else num_to_forward_prefetch
        backward = config.num_to_backward_prefetch if num_to_backward_prefetch is None else num_to_backward_prefetch
        module = self._module()
        self._prefetch_recorder = PrefetchRecorder(module, list(module.modules()), forward or 0, backward)

    def _module(self) -> nn.Module:
        if not isinstance(self, nn.Module):
            raise TypeError(f"{type(self).__name__} derives from FSDP2Mixin but is no torch.nn.Module")
        return self


def applies_flags(model: nn.Module) -> bool:
    """Whether `model.fully_shard` is FSDP2Mixin's, which also applies the flags that concern sharding."""
    return isinstance(model, FSDP2Mixin) and type(model).fully_shard is FSDP2Mixin.fully_shard


def gathered_dtype(model: nn.Module) -> torch.dtype | None:
    """Return the dtype in which the units of a sharded model gather parameters; None: not known, or as they are."""
    if not isinstance(model, FSDP2Mixin) or model._fsdp2_plan is None:
        return None
    steps = ("fully_shard", "_fully_shard", "set_fullyshard_modules_to_wrap")
    is_own = any(getattr(type(model), step) is not getattr(FSDP2Mixin, step) for step in steps)
    return None if is_own else model._fsdp2_plan.mp_policy.param_dtype


def refuse_own_sharding(model: nn.Module, dims: Dims) -> None:
    """Refuse parallelisms for a model with a `fully_shard` of its own, which doesn't apply them.

    Raises:
        ConfigError: the model doesn't have FSDP2Mixin's `fully_shard`.
    """
    if applies_flags(model):
        return
    refuse_own_float8(type(model).__name__)
    refuse_own_compile(type(model).__name__)
    for size, key, what in (
        (dims.cp, "--context-parallel-size", "tokens"),
        (dims.tp, "--tensor-model-parallel-size", "layers"),
        (dims.ep, "expert_parallel_size", "experts"),
    ):
        if size > 1:
            raise ConfigError(
                f"{key} {size}: {type(model).__name__} has a fully_shard of its own, which doesn't split {what} over "
                "ranks; set it to 1, or let the class derive from FSDP2Mixin and keep its fully_shard"
            )


def init_function(root: nn.Module, module: nn.Module, name: str) -> Callable[[nn.Module], None]:
    """Return the `_init_weights` of `module` or of its innermost ancestor that has one; else WeightInitMixin's."""
    if is_adapter(name):
        return _zero  # `draw_adapters` gives them values once the model's own weights are there
    found: Any = root
    current = root
    for part in name.split(".") if name else ():
        current = getattr(current, part)
        if hasattr(current, "_init_weights"):
            found = current
    if hasattr(found, "_init_weights"):
        return found._init_weights
    return WeightInitMixin._init_weights.__get__(root)


def _zero(module: nn.Module) -> None:
    for param in module.parameters(recurse=False):
        nn.init.zeros_(param)


class WeightInitMixin:
    """Random initialisation for models that have none of their own.

    Linear and convolution weights and embeddings are normal with standard deviation 0.02, biases zero, norms one.
    """

    def init_weights(self) -> None:
        """Initialise every module of this model in place, children before parents (unsharded models)."""
        if not isinstance(self, nn.Module):
            raise TypeError(f"{type(self).__name__} derives from WeightInitMixin but is no torch.nn.Module")
        with torch.no_grad():
            self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module, std: float = 0.02) -> None:
        with torch.no_grad():
            if isinstance(module, nn.MultiheadAttention):
                module._reset_parameters()
                return
            is_norm = "norm" in type(module).__name__.lower()
            for name, param in module.named_parameters(recurse=False):
                if is_norm and name == "weight":
                    param.fill_(1.0)
                elif "bias" in name:
                    param.zero_()
                else:
                    param.normal_(0.0, std)
            padding = getattr(module, "padding_idx", None)
            if isinstance(module, nn.Embedding) and padding is not None:
                module.weight[padding].zero_()


@functools.cache
def adapt_class(hf_class: type) -> type:
    """Return `hf_class` with the mixins, under its own name: exports and configs keep the architecture's name.

    A class of diffusers is initialised as in its constructor; build it with `build_on_meta`.
    """
    initialiser = DiffusersInitMixin if is_diffusers_class(hf_class) else WeightInitMixin
    return type(hf_class.__name__, (hf_class, FSDP2Mixin, initialiser), {"__module__": hf_class.__module__})
