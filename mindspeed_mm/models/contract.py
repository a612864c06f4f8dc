"""The contract between a model, whoever wrote it, and the rest of the framework.

A trained model may state any of the attributes and methods below; only those that its backend needs are required.
`as_trainable`, `as_shardable` and `as_staged` are the only places that read them from a model: everything else uses the
typed views that these functions return, which read the model's attributes on each access.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from mindspeed_mm.models.common.family import FamilyTraits
from mindspeed_mm.models.common.megatron_names import ParamMapping
from mindspeed_mm.models.common.pipeline_layout import PipelineLayout
from mindspeed_mm.utils.errors import ConfigError

if TYPE_CHECKING:
    import torch.distributed as dist

    from mindspeed_mm.models.common.adapters import AdapterPlan
    from mindspeed_mm.models.common.sharding_outline import ShardingOutline

ExpectedFactor = Callable[[int], "float | torch.Tensor"]


class WeightOrigin(NamedTuple):
    """Where a model's weights come from.

    Attributes:
        source: HF directory that an export starts from; None: there is none.
        dtype: dtype of the weights in `source`; exports are written in it. None: exports keep the trained dtype.
        pending: HF directory that a model built without values is filled from later; None: no weights are pending.
    """

    source: str | None
    dtype: torch.dtype | None
    pending: Path | None

    @property
    def absolute_source(self) -> str | None:
        """`source` as a path that is valid from any working folder."""
        return str(Path(self.source).absolute()) if self.source else None


class ModelOutline(NamedTuple):
    """A model in a few words.

    Attributes:
        name: of its class.
        parameters, trained: numbers of its parameters' elements, in all and trained.
        attention: the attention function of the language model, by transformers' name; None: it is none of theirs.
    """

    name: str
    parameters: int
    trained: int
    attention: str | None


class Trainable:
    """Properties of a model for every backend, checkpoint and metric.

    Attributes:
        model: the user's own module, without wrappers.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @property
    def name(self) -> str:
        """Name of the model's class, for messages."""
        return type(self.model).__name__

    @property
    def config(self) -> Any:
        """`config`: what the model was built from; None: not stated."""
        return _stated(self.model, "config")

    @property
    def traits(self) -> FamilyTraits | None:
        """`traits`: names of the model's parts and towers; None: not stated."""
        found = _stated(self.model, "traits")
        return found if isinstance(found, FamilyTraits) else None

    @property
    def weights(self) -> WeightOrigin:
        """`source`, `source_dtype` and `pending_weights`."""
        pending = _stated(self.model, "pending_weights")
        return WeightOrigin(
            _stated(self.model, "source"), _stated(self.model, "source_dtype"), Path(pending) if pending else None
        )

    @property
    def ema_decay(self) -> float | None:
        """`ema_decay`: decay of the exponential moving average of the weights; None: no average is kept."""
        return _stated(self.model, "ema_decay")

    @property
    def take_flops(self) -> Callable[[], float] | None:
        """`take_flops`: returns the FLOPs of the micro-batches since its last call; None: the model counts none."""
        return _stated(self.model, "take_flops")

    @property
    def adapter_plan(self) -> AdapterPlan | None:
        """`adapter_plan`: what has adapters, and what else is trained; None: the model has none."""
        return _stated(self.model, "adapter_plan")

    @property
    def is_transformers(self) -> bool:
        """Whether the model has `config`, `get_decoder` and `get_output_embeddings`, as transformers models do."""
        return all(hasattr(self.model, name) for name in ("config", "get_decoder", "get_output_embeddings"))

    @property
    def outline(self) -> ModelOutline:
        """The model in a few words; of a whole model, before it is sharded."""
        numbers = [(p.numel(), p.requires_grad) for p in self.model.parameters()]
        attention = None
        if self.is_transformers:
            decoder: Any = self.model.get_decoder()  # type: ignore[operator]
            attention = _stated(decoder.config, "_attn_implementation")
        return ModelOutline(
            self.name, sum(n for n, _ in numbers), sum(n for n, is_trained in numbers if is_trained), attention
        )

    @property
    def output_layer(self) -> nn.Module | None:
        """Result of `get_output_embeddings()`: the layer that computes logits; None: not stated."""
        find = _stated(self.model, "get_output_embeddings")
        return None if find is None else find()

    @property
    def block_classes(self) -> set[str]:
        """Class names of the model's blocks, as transformers and diffusers models state them."""
        stated = (_stated(self.model, name) for name in ("_no_split_modules", "_repeated_blocks"))
        return {name for names in stated for name in names or ()}

    @property
    def left_out(self) -> tuple[str, ...]:
        """Patterns of tensor names that the model's library ignores silently when it loads the class."""
        return tuple(_stated(self.model, "_keys_to_ignore_on_load_unexpected") or ())

    def keeps_in_float32(self, dtype: torch.dtype) -> Callable[[str], bool]:
        """Return whether a parameter, by its name, stays in float32 when the model computes in `dtype`.

        Models of transformers and diffusers state it, as do those that are a part of this one.
        """
        stated: list[tuple[str, Callable[[str], bool]]] = []
        for path, module in self.model.named_modules():
            plan, names = _stated(module, "_get_dtype_plan"), _stated(module, "_keep_in_fp32_modules")
            if plan is not None:
                if patterns := [pattern for pattern, kept in plan(dtype).items() if kept == torch.float32]:
                    stated.append((path, _glob_search(patterns)))
            elif names:
                stated.append((path, functools.partial(_has_segment, frozenset(names))))
        return lambda name: any(
            found(name.removeprefix(f"{path}.")) for path, found in stated if not path or name.startswith(f"{path}.")
        )

    @property
    def prepare(self) -> Callable[[dict[str, Any]], dict[str, Any]] | None:
        """`prepare`: prepares a collated micro-batch, in host memory, without weights; None: not stated."""
        return _stated(self.model, "prepare")

    def check_packing(self) -> None:
        """Call the model's `check_packing`, if it has one.

        Raises:
            ConfigError: the model can't train on packed rows.
        """
        check = _stated(self.model, "check_packing")
        if check is not None:
            check()

    def freeze(self, config: Any) -> None:
        """Call the model's `freeze`, if it has one, with the content of model.json."""
        freeze = _stated(self.model, "freeze")
        if freeze is not None:
            freeze(config)

    def generating(self) -> AbstractContextManager[None]:
        """Return the result of `generating()`: a context in which the model's own library may generate with it."""
        enter = _stated(self.model, "generating")
        return nullcontext() if enter is None else enter()

    def set_expected_factor(self, expected: ExpectedFactor) -> None:
        """Set `expected_factor`, if the model has it: the approximate gradient of its loss in a float16 backward."""
        if hasattr(self.model, "expected_factor"):
            self.model.expected_factor = expected  # type: ignore[assignment]

    def final_export_layout(self) -> PipelineLayout | None:
        """Return the result of `export_layout`: the diffusers pipeline around the model; None: it is exported alone."""
        describe = _stated(self.model, "export_layout")
        return None if describe is None else describe()


class Shardable(Trainable):
    """Properties for the FSDP2 backend of a model with `fully_shard`."""

    @property
    def sharded_module(self) -> nn.Module:
        """`sharded_module`: the module that `fully_shard` shards and checkpoints name; not stated: the model itself."""
        stated = _stated(self.model, "sharded_module")
        return self.model if stated is None else stated

    def waiting(self) -> Iterator[tuple[nn.Module, Path]]:
        """Yield each module with pending weights, the model itself or a submodule, with the directory of the weights.

        For a module that delegates its sharding, the module that it delegates to is yielded.
        """
        for module in self.model.modules():
            directory = as_trainable(module).weights.pending
            if directory is not None:
                yield Shardable(module).sharded_module, directory

    def set_weights_come_later(self, later: bool) -> None:
        """Set `weights_come_later`: whether weights are loaded after sharding, so that no random ones are drawn."""
        self.model.weights_come_later = later  # type: ignore[assignment]

    def fully_shard(self, process_group: dist.ProcessGroup | None, fsdp2_config_path: str | None) -> None:
        """Call the model's `fully_shard`, which shards it in place."""
        self.model.fully_shard(  # type: ignore[operator]
            process_group=process_group, fsdp2_config_path=fsdp2_config_path
        )

    def plan_sharding(self, world_size: int, fsdp2_config_path: str | None) -> ShardingOutline | None:
        """Return the result of `plan_sharding` for a number of ranks; None: the model shards itself in its own way."""
        plan = _stated(self.model, "plan_sharding")
        return None if plan is None else plan(world_size, fsdp2_config_path)

    def idle_towers(self) -> list[tuple[tuple[str, ...], list[nn.Parameter]]]:
        """Return the modalities and the trained parameters of each tower that a batch may leave idle."""
        towers = self.traits.towers if self.traits is not None else ()
        known = [t for t in towers if t.run_dummy is not None]  # media counts of others aren't reliable
        return [(t.modalities, [p for p in t.parameters(self.sharded_module) if p.requires_grad]) for t in known]


class Staged(Trainable):
    """Properties for the Megatron backend of a pipeline stage's chunk, with `set_input_tensor` and a `config`."""

    @property
    def meta_model(self) -> Any:
        """`meta_model()`: the whole transformers model on the meta device; None: there is none."""
        build = _stated(self.model, "meta_model")
        return None if build is None else build()

    @property
    def param_mapping(self) -> Callable[[str], ParamMapping] | None:
        """`param_mapping`: name of a parameter → the transformers tensors that it consists of; None: not stated."""
        return _stated(self.model, "param_mapping")

    def names_of(self, name: str) -> tuple[str, ...]:
        """Return the names of the transformers tensors of a parameter; without `param_mapping`, its own name."""
        return (name,) if self.param_mapping is None else self.param_mapping(name).sources

    def modalities_of(self, name: str) -> tuple[str, ...]:
        """Return the modalities of the tower that a parameter belongs to (`modalities_of`); (): it belongs to none."""
        find = _stated(self.model, "modalities_of")
        return () if find is None else tuple(find(name))

    @property
    def has_tied_head(self) -> bool:
        """`share_embeddings_and_output_weights`: whether the output layer shares the embedding's weight."""
        return bool(_stated(self.model, "share_embeddings_and_output_weights"))

    def tied_copy(self) -> nn.Parameter | None:
        """Return the chunk's copy of a tied embedding if another chunk has the other; None: it has none, or both."""
        model: Any = self.model
        if not self.has_tied_head or model.pre_process == model.post_process:
            return None
        return model.shared_embedding_or_output_weight()

    def set_model_type(self, default: Any) -> None:
        """Set the `model_type` that Megatron's schedules read, unless the model has one."""
        self.model.model_type = getattr(self.model, "model_type", default)


def as_trainable(model: nn.Module) -> Trainable:
    """Return the view of a model that every backend uses."""
    return Trainable(model)


def as_shardable(model: nn.Module) -> Shardable:
    """Return the view of a model that the FSDP2 backend uses.

    Raises:
        ConfigError: the model has no `fully_shard`.
    """
    if not hasattr(model, "fully_shard"):
        raise ConfigError(
            f"--use-torch-fsdp2: {type(model).__name__}, which model_provider returned, has no fully_shard; derive its "
            "class from FSDP2Mixin (mindspeed_mm.models.common.base_model)"
        )
    return Shardable(model)


def as_staged(chunk: nn.Module) -> Staged:
    """Return the view of a pipeline stage's chunk that the Megatron backend uses.

    Raises:
        ConfigError: the chunk has no `set_input_tensor` or no `config`.
    """
    if not hasattr(chunk, "set_input_tensor") or not hasattr(chunk, "config"):
        raise ConfigError(
            f"{type(chunk).__name__}, which model_provider returned, has no set_input_tensor or no config (a "
            "TransformerConfig): Megatron's schedules can't drive it; build it of Megatron-core's modules, or add "
            "--use-torch-fsdp2"
        )
    return Staged(chunk)


def _stated(model: Any, name: str) -> Any:
    return getattr(model, name, None)


def _glob_search(patterns: list[str]) -> Callable[[str], bool]:
    """Return whether a name contains one of transformers' patterns, as its loading finds them."""
    from transformers.core_model_loading import build_glob_alternation

    search = build_glob_alternation(list(patterns))[0].search
    return lambda name: search(name) is not None


def _has_segment(names: frozenset[str], name: str) -> bool:
    """Whether a segment of a dotted name is one of `names`, as diffusers' loading finds them."""
    return not names.isdisjoint(name.split("."))
