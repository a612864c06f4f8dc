"""What a model states to the planning of tensor parallelism, and fsdp2.yaml in the place of it."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from mindspeed_mm.configs.dims import Dims
from mindspeed_mm.configs.fsdp2_config import Fsdp2Config
from mindspeed_mm.models.common.family import FamilyTraits
from mindspeed_mm.models.common.paths import find_modules
from mindspeed_mm.models.contract import as_trainable
from mindspeed_mm.parallel.patterns import containing_path, join_paths
from mindspeed_mm.parallel.tensor_plan import TensorSplit, TensorTarget, plan_tensor_parallel
from mindspeed_mm.parallel.tensor_sequence import SequenceRegions, find_regions
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.log import notice


def plan_tensor_layers(model: nn.Module, traits: FamilyTraits, config: Fsdp2Config, dims: Dims) -> TensorSplit:
    """Find what tensor parallelism splits: what fsdp2.yaml names, or else what the family states.

    Args:
        model: not sharded yet; it may be on the meta device.
        dims: sizes of the parallelisms.

    Raises:
        ConfigError: paths that match nothing, layers that can't be split, or a split layer in an ignored module.
    """

    def found(key: str, patterns: list[str] | None) -> dict[str, nn.Module] | None:
        return None if patterns is None else find_modules(model, patterns, where=f"{config.file}: {key}")

    split = plan_tensor_parallel(
        _target(model, traits),
        dims,
        found("tp_colwise", config.tp_colwise),
        found("tp_rowwise", config.tp_rowwise),
        where=config.file,
    )
    ignored = found("ignored_modules", config.ignored_modules) or {}
    for path in (*split.paths, *split.head_norms):
        container = containing_path(path, ignored)
        if container is not None:
            raise ConfigError(
                f"{config.file}: ignored_modules: '{container}' contains '{path}', which tensor parallelism splits; "
                "leave it out of ignored_modules, or out of tp_colwise and tp_rowwise"
            )
    return split


def plan_sequence_regions(model: nn.Module, traits: FamilyTraits, split: TensorSplit) -> SequenceRegions | None:
    """Find what sequence parallelism changes in the decoder layers; None: nothing, which a notice says.

    Args:
        model: not sharded yet; it may be on the meta device.
        split: what tensor parallelism splits.

    Raises:
        ConfigError: the model states no decoder layers, or they can't work on cut rows.
    """
    target = _target(model, traits)
    if target.layers is None:
        raise ConfigError(
            f"--sequence-parallel: {target.name} states no decoder layers between which rows could be cut; leave it out"
        )
    uncut = 0 if traits.tensor.uncut_layers is None else traits.tensor.uncut_layers(model)
    layers = {
        join_paths(target.layers, name): layer
        for number, (name, layer) in enumerate(model.get_submodule(target.layers).named_children())
        if number >= uncut
    }
    regions = find_regions(layers, split.blocks, (*split.columns, *split.rows))
    if regions is None:
        notice(
            f"--sequence-parallel has no effect here: {target.name} changes whole rows after each of its {uncut} layers"
        )
    elif uncut:
        notice(f"--sequence-parallel: {target.name} changes whole rows after its first {uncut} layers: these keep them")
    return regions


def _target(model: Any, traits: FamilyTraits) -> TensorTarget:
    name = next(c.__name__ for c in type(model).__mro__ if not c.__name__.startswith("FSDP"))
    if not as_trainable(model).is_transformers:
        return TensorTarget(model, name, plan=traits.tensor)
    paths = {id(module): path for path, module in model.named_modules()}
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    layers = join_paths(paths[id(decoder)], "layers") if isinstance(decoder, nn.Module) else None
    if layers is not None and "layers" not in decoder._modules:
        layers = None
    text = model.config.get_text_config()
    heads = {"attention heads": "num_attention_heads", "key-value heads": "num_key_value_heads"}
    sizes = {what: _number_of(text, key) for what, key in heads.items()}
    return TensorTarget(
        model,
        name,
        layers=layers,
        head=None if head is None else paths[id(head)],
        sizes={what: size for what, size in sizes.items() if size is not None},
        plan=traits.tensor,
    )


def _number_of(text_config: Any, key: str) -> int | None:
    """Return a number of heads; where layers have different ones, the largest that divides all of them."""
    if not getattr(text_config, "is_heterogeneous", False):
        return getattr(text_config, key, None)
    layers = range(text_config.num_hidden_layers)
    return math.gcd(*(getattr(text_config.per_layer_config[number], key) for number in layers))
