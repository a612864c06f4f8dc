"""Predict the cost of training on a sample from its size and the model's config.json: the measure of balance."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm.data.media.media import SampleSize
from mindspeed_mm.utils.log import notice


@dataclass(frozen=True)
class CostModel:
    """Cost of a sample: a part for each position and patch, and what attention adds as a sample grows.

    A multiply-add counts as two operations, a matrix of n weights as 2n a position forward and as much again for each
    of its two gradients; attention adds 4 × heads × head size × length a layer and position, half of it where it is
    causal. Every position is taken for a target (which ones are isn't known from a size), so that the head counts
    for all of them. Samples of a pack don't see each other: the cost of a pack is the sum of theirs.
    Source: Chowdhery et al., PaLM (arXiv 2204.02311), appendix B, applied part by part.

    Attributes:
        per_token: FLOPs of a position, without attention's scores and values.
        per_squared_token: FLOPs of causal attention, per (tokens of the sample)².
        per_patch: FLOPs of a media patch in its tower, windowed attention included.
        per_squared_patch: FLOPs of the tower's whole attention, per (patches of a picture)².
    """

    per_token: float = 1.0
    per_squared_token: float = 0.0
    per_patch: float = 0.0
    per_squared_patch: float = 0.0

    def cost(self, size: SampleSize) -> float:
        """Cost of one sample, in FLOPs (in tokens where nothing is known of the model)."""
        return float(self.costs(size.tokens, size.patches, size.squared_patches))

    def costs(
        self, tokens: int | np.ndarray, patches: int | np.ndarray, squared_patches: int | np.ndarray
    ) -> float | np.ndarray:
        """Costs of samples of these sizes, each a number or an array of one number a sample, int64."""
        return (
            self.per_token * tokens
            + self.per_squared_token * tokens**2
            + self.per_patch * patches
            + self.per_squared_patch * squared_patches
        )

    @classmethod
    def from_config(cls, path: str | Path, *, tower_trained: bool = True, text_trained: bool = True) -> CostModel:
        """Read the coefficients from a model directory's config.json; where it lacks numbers, tokens are counted.

        Args:
            path: The directory, or the file.
            tower_trained: Whether the vision tower is trained.
            text_trained: Whether the language model is trained.
        """
        file = Path(path)
        file = file / "config.json" if file.is_dir() else file
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            notice(f"{file}: what a row costs can't be read from it ({error}); its tokens are counted")
            return cls()
        whole = config.get("thinker_config", config)
        text = whole.get("text_config") or whole
        tower = whole.get("vision_config")
        try:
            per_token, per_squared_token = _text_cost(text)
            per_patch, per_squared_patch = _tower_cost(tower, text["hidden_size"]) if tower else (0.0, 0.0)
        except (KeyError, TypeError) as error:
            notice(f"{file}: what a row costs can't be computed from it ({error!r} not found); its tokens are counted")
            return cls()
        below = bool(tower) and tower_trained
        tower_passes = 3 if tower_trained else 1
        attention_passes = 3 if text_trained or below else 1
        return cls(
            per_token * (3 if text_trained else 2 if below else 1),
            per_squared_token * attention_passes,
            per_patch * tower_passes,
            per_squared_patch * tower_passes,
        )


def _text_cost(config: Mapping[str, Any]) -> tuple[float, float]:
    """Forward FLOPs a token, and a squared token."""
    hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
    head_size = config.get("head_dim") or hidden // heads
    groups = config.get("num_key_value_heads") or heads
    attention = hidden * head_size * (2 * heads + 2 * groups)
    experts = config.get("num_experts_per_tok")
    if experts and config.get("moe_intermediate_size"):
        width = experts * config["moe_intermediate_size"] + (config.get("shared_expert_intermediate_size") or 0)
    else:
        width = config["intermediate_size"]
    per_token = 2.0 * (layers * (attention + 3 * hidden * width) + hidden * config["vocab_size"])
    return per_token, 4.0 * heads * head_size * layers / 2


def _tower_cost(config: Mapping[str, Any], text_hidden: int) -> tuple[float, float]:
    """Forward FLOPs a patch, and a squared patch."""
    layers = config.get("depth") or config["num_hidden_layers"]
    # Qwen2-VL calls the tower's own width embed_dim, and its output's hidden_size
    hidden = config.get("embed_dim") or config["hidden_size"]
    width = config.get("intermediate_size") or int(hidden * config["mlp_ratio"])
    matrices = 3 if config.get("hidden_act") == "silu" else 2
    size, merge = config["patch_size"], config.get("spatial_merge_size") or 1
    pixels = (config.get("in_channels") or config.get("in_chans") or config.get("num_channels") or 3) * size**2
    embedding = pixels * (config.get("temporal_patch_size") or 1) * hidden
    output = config.get("out_hidden_size") or text_hidden
    merger = hidden**2 * merge**2 + hidden * output
    whole = layers
    per_patch = 2.0 * (embedding + layers * (4 * hidden**2 + matrices * hidden * width) + merger)
    if config.get("window_size") and config.get("fullatt_block_indexes") is not None:
        whole = len(config["fullatt_block_indexes"])
        per_patch += 4.0 * hidden * (layers - whole) * (config["window_size"] // size) ** 2
    return per_patch, 4.0 * hidden * whole
