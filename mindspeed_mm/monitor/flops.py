"""Model FLOPs of a step, with the vision tower counted, for MFU.

A multiply-add counts as two operations. Per token (or patch) a matrix of n weights costs 2n forward, 2n for its own
gradient where it is trained, 2n for the gradient of its input where something below it is trained. Attention adds
4 * length * hidden forward per layer and token (scores and values; half of it where attention is causal), twice that
backward. A token goes through the experts that it is sent to, not through all of them. Recomputed activations are not
counted: MFU compares with the useful work.
Source: Chowdhery et al., PaLM (arXiv 2204.02311), appendix B, applied part by part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from mindspeed_mm.data.loading.counting import BatchCounts
from mindspeed_mm.models.common.family import FamilyTraits
from mindspeed_mm.models.common.quantized import NF4Linear, packed_layers
from mindspeed_mm.models.contract import as_trainable

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class FlopsModel:
    """FLOPs of one unit of each kind of input.

    Attributes:
        per_token: FLOPs of a text position, without attention and head.
        per_target: FLOPs of the head for a target position.
        per_squared_length: FLOPs of causal attention, per (row's tokens)².
        per_patch: FLOPs of a row of a media tensor (a patch, or a whole picture) in its tower.
    """

    per_token: float
    per_target: float
    per_squared_length: float
    per_patch: float

    def of(self, counts: BatchCounts) -> float:
        """Return the FLOPs of counted inputs; over all ranks if the counts are global."""
        return (
            self.per_token * counts.tokens
            + self.per_target * counts.targets
            + self.per_squared_length * counts.squared_lengths
            + self.per_patch * counts.patches
        )


def flops_model(model: nn.Module, traits: FamilyTraits) -> FlopsModel | None:
    """Read the costs from a transformers model; None where its configuration lacks the usual names.

    Args:
        model: sharded or not; unsharded shapes count.
    """
    config: Any = as_trainable(model).config
    text = getattr(config, "text_config", config)
    if traits.language_model is None or not hasattr(text, "num_hidden_layers"):
        return None
    packed = packed_layers(model)
    towers = {t.path: model.get_submodule(t.path) for t in traits.towers}
    tower_trained = any(p.requires_grad for tower in towers.values() for p in tower.parameters())
    language = model.get_submodule(traits.language_model)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    skipped = {id(p) for m in (embedding, head) for p in m.parameters()}
    per_token = sum(
        _cost(p, tower_trained, packed) * _share(name, p, text)
        for name, p in language.named_parameters()
        if id(p) not in skipped
    )
    language_trained = any(p.requires_grad for p in language.parameters())
    passes = 3 if language_trained or tower_trained else 1
    attention = 4 * text.hidden_size * text.num_hidden_layers / 2 * passes
    rows = {t.path: t.patches_per_row(config) for t in traits.towers}
    per_patch = sum(rows[path] * _cost(p, False, packed) for path, tower in towers.items() for p in tower.parameters())
    per_target = sum(_cost(p, language_trained or tower_trained, packed) for p in head.parameters())
    return FlopsModel(per_token, per_target, attention, per_patch)


def _share(name: str, param: nn.Parameter, text: PreTrainedConfig) -> float:
    """Of weights stacked over experts [experts, rows, columns], the share that one token uses."""
    if param.dim() != 3 or "experts" not in name.split("."):
        return 1.0
    return getattr(text, "num_experts_per_tok", param.shape[0]) / param.shape[0]


def _cost(param: nn.Parameter, input_needs_gradient: bool, packed: Mapping[int, NF4Linear]) -> float:
    if param.dim() < 2:
        return 0.0
    layer = packed.get(id(param))
    weights = param.numel() if layer is None else layer.in_features * layer.out_features
    return 2.0 * weights * (1 + param.requires_grad + (input_needs_gradient or param.requires_grad))
