"""What a family folder tells about its models; everything has a default that suits plain text models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from mindspeed_mm.models.common.idle_tower import Tower


@dataclass(frozen=True)
class FamilyTraits:
    """Names of parts, relative to the transformers model.

    Attributes:
        language_model: path of the module that receives `inputs_embeds`.
        parts: published part name (vision_encoder, vision_projector, audio_encoder, text_decoder) → module paths, for
            freezing. A part's paths may hold another part (the projector inside the tower): the more exact key wins.
        sub_configs: published block (vision_encoder, audio_encoder, text_decoder) → key of the HF sub-config.
        towers: encoders that a batch may leave idle.
    """

    language_model: str | None = None
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sub_configs: Mapping[str, str] = field(default_factory=dict)
    towers: tuple[Tower, ...] = ()


def traits_of(model: Any) -> FamilyTraits:
    """The traits that the model's class states (attribute `traits`), or those of a plain text model."""
    traits = getattr(model, "traits", None)
    if isinstance(traits, FamilyTraits):
        return traits
    return FamilyTraits(parts={"text_decoder": ("",)})


def freeze_parts(model: nn.Module, traits: FamilyTraits, frozen: Mapping[str, bool]) -> list[str]:
    """Set requires_grad of the parts named in `frozen` (True: not trained). Parts not named stay trainable.

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
            param.requires_grad_(not exact[id(param)])
    return [part for part, value in frozen.items() if value and part in traits.parts]
