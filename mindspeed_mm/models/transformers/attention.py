"""Which attention each part of a transformers model has: what model.json states, or the fastest the device runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

from mindspeed_mm import accelerator
from mindspeed_mm.configs.model_config import TransformersModelConfig
from mindspeed_mm.models.common.document_attention import why_not_by_documents
from mindspeed_mm.models.common.family import FamilyTraits
from mindspeed_mm.models.common.idle_tower import Tower
from mindspeed_mm.models.common.tower_attention import attend_by_lengths
from mindspeed_mm.utils.log import notice

_Part: TypeAlias = Literal["vision", "audio", "text"]
_PARTS: tuple[_Part, ...] = ("vision", "audio", "text")


def set_attention(hf_config: Any, described: TransformersModelConfig, model_class: type) -> None:
    """Choose each part's attention implementation; one that can't run here is replaced, with a notice."""
    for part in _PARTS:
        wanted = described.attention_of(part)
        if wanted is None:
            continue
        sub_config = getattr(hf_config, f"{part}_config", None) or (hf_config if part == "text" else None)
        if sub_config is not None:
            sub_config._attn_implementation = _usable_attention(wanted, model_class)


def _usable_attention(wanted: str, model_class: type) -> str:
    has_sdpa = getattr(model_class, "_supports_sdpa", True)
    why_not = accelerator.current().why_no_attention(wanted)
    if wanted == "sdpa" and not has_sdpa:
        why_not = f"{model_class.__name__} is not written for it"
    if why_not is None:
        return wanted
    instead = "sdpa" if has_sdpa else "eager"
    notice(f"model.json: attn_implementation {wanted} can't run here ({why_not}); {instead} is used")
    return instead


def why_by_masks(model: Any, traits: FamilyTraits, described: TransformersModelConfig) -> str | None:
    """Return why masks keep the documents of rows apart; None: attention is computed document by document."""
    if traits.attention is None or traits.language_model is None:
        return f"not every layer of {type(model).__name__} is known to be causal or linear attention"
    if (stated := _stated(described, "text")) is not None:
        return f"model.json's attn_implementation is {stated}"
    return why_not_by_documents(model.get_submodule(traits.language_model).config)


def attend_in_towers(model: Any, towers: Iterable[Tower], described: TransformersModelConfig) -> None:
    """Let encoders whose images are one long row compute each of them by itself, unless model.json states how."""
    for tower in towers:
        if _stated(described, "audio" if "audio" in tower.modalities else "vision") is None:
            attend_by_lengths(model.get_submodule(tower.path))


def _stated(described: TransformersModelConfig, part: _Part) -> str | None:
    """Return the attention that model.json chooses for a part; None: none, or one that can't run here."""
    stated = described.attention_of(part)
    return stated if stated is not None and accelerator.current().why_no_attention(stated) is None else None
