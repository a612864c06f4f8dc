"""Traits of a model family: its parts, towers and packed rows; all have defaults that suit plain text models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from mindspeed_mm.models.common.idle_tower import Tower
from mindspeed_mm.models.common.packed import PACKING_KEY, plain_positions
from mindspeed_mm.parallel.tensor_plan import TensorPlan
from mindspeed_mm.utils.errors import ConfigError

PackedPositions = Callable[[Any, Mapping[str, Any], torch.Tensor], torch.Tensor]
PackedMasks = Callable[[Any, Mapping[str, Any]], Any]


@dataclass(frozen=True)
class FamilyTraits:
    """Properties of a family's models; paths are relative to the transformers model.

    Attributes:
        language_model: path of the module that receives `inputs_embeds`.
        parts: published part name (vision_encoder, vision_projector, audio_encoder, text_decoder) → module paths, for
            freezing. A part's paths may contain another part (the projector inside the tower): the longer path wins.
        sub_configs: published block (vision_encoder, audio_encoder, text_decoder) → key of the HF sub-config.
        towers: encoders that a batch may leave idle, in the order in which the model runs them.
        packed_positions: (transformers model, micro-batch, documents [batch, sequence]) → position ids of packed rows,
            restarting with every sample: [batch, sequence], or [4, batch, sequence] with those and the model's own in
            three dimensions. None: the family can't train on packed rows.
        packed_masks: (transformers model, micro-batch of packed rows with its position_ids, and their boundaries
            `packed_rows`) → the model's `attention_mask` for them. None: the model computes it itself, from the
            positions.
        prepare_batch: (transformers model, micro-batch) → the micro-batch as the model takes it, on the host: changed
            so that each tower runs once whatever modalities it contains, or with fields that the data doesn't have.
            None: the model takes it as it is.
        placeholders: kinds of media ("image", "video", "audio") whose masks `model.model.get_placeholder_mask` returns,
            in order; the token of a kind is the configuration's `<kind>_token_id`. (): the model fills them otherwise.
        attention: "causal" if every decoder layer is attention through transformers' attention functions, whose tokens
            see those before them in their sample, all or a sliding window of them: what context parallelism computes.
            "causal or linear" if layers of linear attention, which the model's `layer_types` name, are among them.
            None: not known to be so.
        tensor: names of what tensor parallelism splits in the layers of the language model.
        experts_of_kinds: (experts of text, experts of media): names of the language model's modules of which a token
            goes through those of its kind. None: all tokens have the same experts.
    """

    language_model: str | None = None
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sub_configs: Mapping[str, str] = field(default_factory=dict)
    towers: tuple[Tower, ...] = ()
    packed_positions: PackedPositions | None = None
    packed_masks: PackedMasks | None = None
    prepare_batch: Callable[[Any, dict[str, Any]], dict[str, Any]] | None = None
    placeholders: tuple[str, ...] = ()
    attention: Literal["causal", "causal or linear"] | None = None
    tensor: TensorPlan = field(default_factory=TensorPlan)
    experts_of_kinds: tuple[str, str] | None = None


#: traits of a causal language model without encoders that computes its masks from restarting positions
TEXT_TRAITS = FamilyTraits(
    language_model="model",
    parts={"text_decoder": ("",)},
    sub_configs={"text_decoder": ""},
    packed_positions=plain_positions,
    attention="causal",
)


def require_causal_attention(traits: FamilyTraits, name: str, context_parallel_size: int) -> str:
    """Return the path of the language model, whose attention context parallelism computes.

    Args:
        traits: the family's traits.
        name: name of the model, for the message.
        context_parallel_size: number of ranks that split the tokens of a row, for the message.

    Raises:
        ConfigError: the family doesn't state that the model's attention is plain causal attention.
    """
    if traits.attention != "causal" or traits.language_model is None:
        raise ConfigError(
            f"--context-parallel-size {context_parallel_size}: {name} has attention that isn't known to be causal in "
            "every layer (images that see themselves whole, linear attention), and is not split over ranks; set it to 1"
        )
    return traits.language_model


def require_packed_positions(traits: FamilyTraits, name: str) -> PackedPositions:
    """Return the family's `packed_positions`.

    Args:
        traits: the family's traits.
        name: name of the model, for the message.

    Raises:
        ConfigError: the family has none, so the model can't train on packed rows.
    """
    if traits.packed_positions is None or traits.language_model is None:
        raise ConfigError(
            f"{name} can't train on packed rows: nothing says how its positions restart with each sample of a row; set "
            f"{PACKING_KEY}"
        )
    return traits.packed_positions


def freeze_parts(model: nn.Module, traits: FamilyTraits, frozen: Mapping[str, bool]) -> list[str]:
    """Set requires_grad of the parts named in `frozen` (True: not trained). Parts not named stay trainable.

    Parameters that transformers itself freezes (sinusoidal position tables) stay frozen.

    Returns:
        names of the parts that the model has and that were frozen.
    """
    exact: dict[int, bool] = {}
    for part, paths in sorted(traits.parts.items(), key=lambda item: max(map(len, item[1]), default=0)):
        if part not in frozen:
            continue
        for path in paths:
            for param in model.get_submodule(path).parameters():
                exact[id(param)] = frozen[part]
    for param in model.parameters():
        if id(param) in exact:
            param.requires_grad_(param.requires_grad and not exact[id(param)])
    return [part for part, value in frozen.items() if value and part in traits.parts]
