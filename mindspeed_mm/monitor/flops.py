"""Model FLOPs of a step, with the encoders counted, for MFU.

A multiply-add counts as two operations. Per token (or patch) a matrix of n weights costs 2n forward, 2n for its own
gradient where it is trained, 2n for the gradient of its input where something below it is trained. Attention adds
4 * heads * head size for each pair of a query and a key that it sees, forward, and twice that backward: causal
attention has half of all pairs, sliding windows and chunks fewer, and the samples of a pack don't see each other. A
token goes through the experts that it is sent to, not through all of them. Padding and recomputed activations are not
counted: MFU compares with the useful work.
Source: Chowdhery et al., PaLM (arXiv 2204.02311), appendix B, applied part by part.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from mindspeed_mm.data.loading.counting import BatchCounts
from mindspeed_mm.data.media.media import MediaKind, MediaSize
from mindspeed_mm.data.plan.cost import AttentionCost, attention_cost, tower_attention_cost
from mindspeed_mm.models.common.family import FamilyTraits
from mindspeed_mm.models.common.idle_tower import Tower
from mindspeed_mm.models.common.quantized import NF4Linear, packed_layers
from mindspeed_mm.models.contract import as_trainable
from mindspeed_mm.models.transformers.meta_model import build_meta_copy

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

#: keys of configurations: how many experts a token is sent to
_CHOSEN = ("num_experts_per_tok", "top_k_experts")
_Convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_CROSS = re.compile(r"encoder_attn\.[kv]_proj\.")
_PROJECTORS = ("vision_projector", "audio_projector")


@dataclass(frozen=True)
class TowerFlops:
    """FLOPs of an encoder.

    Attributes:
        per_patch: of a patch or an audio frame, with attention within windows.
        per_squared_patch: of attention, per (patches of a picture or sound)².
        per_token: of what comes after patches were merged to the tokens of a row; of encoders whose pictures have one
            size, of all their matrices; and what media's experts in the language model cost more than those of text.
        attention_per_token: of attention in encoders whose pictures have one size.
    """

    per_patch: float = 0.0
    per_squared_patch: float = 0.0
    per_token: float = 0.0
    attention_per_token: float = 0.0

    def of(self, size: MediaSize) -> float:
        """Return the FLOPs of media."""
        per_token = self.per_token + self.attention_per_token
        return self.per_patch * size.patches + self.per_squared_patch * size.squared_patches + per_token * size.tokens


@dataclass(frozen=True)
class FlopsModel:
    """FLOPs of one unit of each kind of input.

    Attributes:
        per_token: FLOPs of a text position, without attention and head.
        per_target: FLOPs of the head for a target position.
        attention: FLOPs of causal attention.
        towers: kind of media → FLOPs of its encoder.
    """

    per_token: float
    per_target: float
    attention: AttentionCost
    towers: Mapping[MediaKind, TowerFlops] = field(default_factory=dict)

    def of(self, counts: BatchCounts) -> float:
        """Return the FLOPs of a rank's inputs."""
        media = sum(self.towers[kind].of(size) for kind, size in counts.media_sizes.items() if kind in self.towers)
        attention = sum(self.attention.of(length) for length in counts.lengths)
        return self.per_token * counts.tokens + self.per_target * counts.targets + attention + media


def flops_model(model: nn.Module, traits: FamilyTraits) -> FlopsModel | None:
    """Read the costs from a transformers model; None where its configuration lacks the usual names.

    Args:
        model: sharded or not; unsharded shapes count.
    """
    config: Any = as_trainable(model).config
    text = config.get_text_config()
    if traits.language_model is None or not hasattr(text, "num_hidden_layers"):
        return None
    try:
        attention = attention_cost(text.to_dict())
    except KeyError:
        return None
    weights = _Weights(model)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    below = _is_trained(p for t in traits.towers for p in t.parameters(model)) or _is_trained(embedding.parameters())
    language = model.get_submodule(traits.language_model)
    flows = below or _is_trained(language.parameters())
    skipped = {id(p) for module in (embedding, head) for p in module.parameters()}
    named = [(name, p) for name, p in language.named_parameters() if id(p) not in skipped]
    of_encoder = [p for name, p in named if config.is_encoder_decoder and _CROSS.search(name)]
    skipped.update(id(p) for p in of_encoder)
    costs = {name: weights.cost(p, flows) * _share(name, p, text) for name, p in named if id(p) not in skipped}
    of_text, of_media = (
        sum(cost for name, cost in costs.items() if kind in name.split("."))
        for kind in traits.experts_of_kinds or ("", "")
    )
    per_token = sum(costs.values()) - of_media
    if of_encoder:  # each token sees all positions of the encoder
        per_token += attention.whole * config.max_source_positions * (3 if flows else 1)
    towers: dict[MediaKind, TowerFlops] = {}
    for tower in traits.towers:
        for kind in tower.modalities:
            found = _tower(model, tower, traits, weights, of_encoder)
            towers.setdefault(kind, replace(found, per_token=found.per_token + of_media - of_text))  # type: ignore[arg-type]
    per_target = sum(weights.cost(p, flows) for p in head.parameters())
    return FlopsModel(per_token, per_target, attention.times(3 if flows else 1), towers)


def _tower(
    model: nn.Module, tower: Tower, traits: FamilyTraits, weights: _Weights, read: Sequence[nn.Parameter]
) -> TowerFlops:
    """Return the FLOPs of an encoder.

    Args:
        read: weights of the decoder that its outputs are multiplied with.
    """
    after = [path for part in _PROJECTORS for path in traits.parts.get(part, ())] + list(tower.beside)
    if tower.projects_patches:
        after = []
    named = [(name, p) for name, p in model.named_parameters() if _is_in(name, (tower.path, *tower.beside))]
    flows = _is_trained(p for _, p in named)
    if tower.has_one_size and tower.run_dummy is not None:
        return _counted(model, tower.run_dummy, 3 if flows else 1)
    config: Any = as_trainable(model).config
    part = "audio_config" if tower.modalities == ("audio",) else "vision_config"
    try:
        windows, whole = tower_attention_cost(getattr(config, part, config).to_dict())
    except KeyError:
        windows, whole = 0.0, 0.0
    passes = 3 if flows else 1
    layers = _layers_of(model.get_submodule(tower.path))
    bins = getattr(getattr(config, "audio_config", config), "num_mel_bins", 128)
    rows, positions = _rows_of_frames(layers, bins) if part == "audio_config" else _rows_of_patches(layers)
    first = next((layer.weight for layer in layers if isinstance(layer, _Convolution)), None)  # its input isn't trained
    encoding = [p for name, p in named if not _is_in(name, after)]
    per_patch = sum(weights.cost(p, flows and p is not first) * rows.get(id(p), positions) for p in encoding)
    per_patch += sum(weights.cost(p, flows) * positions for p in read)
    return TowerFlops(
        per_patch + windows * passes,
        whole * positions**2 * passes,
        sum(weights.cost(p, flows) for name, p in named if _is_in(name, after)),
    )


def _counted(model: nn.Module, run: Callable[[Any, torch.device], torch.Tensor], passes: int) -> TowerFlops:
    """Return the FLOPs of encoders of one picture, by torch's formulas for what they run on the meta device.

    Args:
        run: runs them on one picture → [tokens, hidden].
        passes: forward, and two as costly ones backward where they are trained.
    """
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        tokens = len(run(build_meta_copy(model), torch.device("meta")))
    attention, matrices = 0, 0
    for operator, count in counter.get_flop_counts()["Global"].items():
        if "attention" in str(operator) or "bmm" in str(operator):
            attention += count
        else:
            matrices += count
    return TowerFlops(per_token=matrices * passes / tokens, attention_per_token=attention * passes / tokens)


def _layers_of(tower: nn.Module) -> list[Any]:
    return [module for module in tower.modules() if isinstance(module, (nn.Linear, *_Convolution))]


def _rows_of_patches(layers: Sequence[Any]) -> tuple[dict[int, float], float]:
    """Return how many rows of its input each weight is multiplied with for a patch of a picture.

    The first convolution cuts patches; those with strides after it leave fewer rows to the modules that follow.
    """
    rows: dict[int, float] = {}
    now, has_patches = 1.0, False
    for layer in layers:
        if isinstance(layer, _Convolution):
            now, has_patches = now / (math.prod(layer.stride) if has_patches else 1), True
        rows[id(layer.weight)] = now
    return rows, 1.0


def _rows_of_frames(layers: Sequence[Any], bins: int) -> tuple[dict[int, float], float]:
    """Return how many rows of its input each convolution is multiplied with for a frame of a sound, and the positions.

    Encoders of sounds begin with their convolutions, whatever the order of their modules.

    Args:
        bins: of a frame's spectrum; convolutions over time and spectrum leave fewer of them, too.

    Returns:
        weight → rows, and the positions that are left of a frame behind all convolutions.
    """
    rows: dict[int, float] = {}
    now, left = 1.0, float(bins)
    for layer in layers:
        if not isinstance(layer, _Convolution):
            continue
        over_spectrum = len(layer.stride) > 1
        left /= layer.stride[0] if over_spectrum else 1
        now /= layer.stride[-1]
        rows[id(layer.weight)] = now * (left if over_spectrum else 1)
    return rows, now


class _Weights:
    """The matrices of a model's layers; tables that are looked up or added cost nothing."""

    def __init__(self, model: nn.Module) -> None:
        self._packed: Mapping[int, NF4Linear] = packed_layers(model)
        self._tables = {
            id(p)
            for module in model.modules()
            for name, p in module.named_parameters(recurse=False)
            if isinstance(module, nn.Embedding) or "embedding" in name or "table" in name
        }
        self._tables -= {id(p) for p in model.get_output_embeddings().parameters()}  # tied, its rows are multiplied

    def cost(self, param: nn.Parameter, input_needs_gradient: bool) -> float:
        """Return the FLOPs of a weight for one row of its input."""
        if param.dim() < 2 or id(param) in self._tables:
            return 0.0
        layer = self._packed.get(id(param))
        weights = param.numel() if layer is None else layer.in_features * layer.out_features
        return 2.0 * weights * (1 + param.requires_grad + input_needs_gradient)


def _is_trained(parameters: Iterable[nn.Parameter]) -> bool:
    return any(p.requires_grad for p in parameters)


def _is_in(name: str, paths: Iterable[str]) -> bool:
    return any(name == path or name.startswith(f"{path}.") for path in paths)


def _share(name: str, param: nn.Parameter, text: PreTrainedConfig) -> float:
    """Of weights stacked over experts [experts, rows, columns], the share that one token uses."""
    if param.dim() != 3 or "experts" not in name.split("."):
        return 1.0
    chosen = next((value for key in _CHOSEN if (value := getattr(text, key, None))), param.shape[0])
    return chosen / param.shape[0]
