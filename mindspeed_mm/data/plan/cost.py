"""Predict the cost of training on a sample from its size and the model's config.json: the measure of balance."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm.data.media.media import SampleSize
from mindspeed_mm.utils.log import notice


@dataclass(frozen=True)
class AttentionCost:
    """FLOPs of the scores and values of a language model's causal attention, forward.

    Attributes:
        whole: for each pair of a query and a key, of all layers whose tokens see all before them.
        windows: size of a sliding window → the same, of the layers that have it.
        chunks: size of the chunks into which samples are cut → the same, of the layers that do so.
    """

    whole: float = 0.0
    windows: Mapping[int, float] = field(default_factory=dict)
    chunks: Mapping[int, float] = field(default_factory=dict)

    def of(self, length: int | np.ndarray) -> Any:
        """Return the FLOPs of a sample of `length` tokens, a float, or of each in an array; half of all pairs see each
        other."""
        total = self.whole * length**2 / 2
        for window, cost in self.windows.items():
            total += cost * (length**2 - np.maximum(length - window, 0) ** 2) / 2
        for size, cost in self.chunks.items():
            total += cost * (length // size * size**2 + (length % size) ** 2) / 2
        return total

    def times(self, passes: float) -> AttentionCost:
        """Return the cost of so many passes."""
        windows = {size: cost * passes for size, cost in self.windows.items()}
        return AttentionCost(self.whole * passes, windows, {size: cost * passes for size, cost in self.chunks.items()})


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
        attention: FLOPs of causal attention.
        per_patch: FLOPs of a media patch in its tower, windowed attention included.
        per_squared_patch: FLOPs of the tower's whole attention, per (patches of a picture)².
    """

    per_token: float = 1.0
    attention: AttentionCost = AttentionCost()
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
            + self.attention.of(tokens)
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
            per_token, attention = _text_cost(text), attention_cost(text)
            first, per_patch, per_squared_patch = _tower_cost(tower, text["hidden_size"]) if tower else (0.0, 0.0, 0.0)
            if tower and whole.get("high_res_vision_config"):
                per_patch += _second_tower_cost(whole["high_res_vision_config"], tower)
        except (KeyError, TypeError) as error:
            notice(f"{file}: what a row costs can't be computed from it ({error!r} not found); its tokens are counted")
            return cls()
        below = bool(tower) and tower_trained
        tower_passes = 3 if tower_trained else 1
        attention_passes = 3 if text_trained or below else 1
        return cls(
            per_token * (3 if text_trained else 2 if below else 1),
            attention.times(attention_passes),
            (first + per_patch) * tower_passes - (first if tower_trained else 0.0),  # pixels have no gradient
            per_squared_patch * tower_passes,
        )


def attention_cost(config: Mapping[str, Any]) -> AttentionCost:
    """Read the cost of a language model's attention from its configuration, as config.json has it.

    Linear attention keeps no scores and counts with its matrices alone.

    Raises:
        KeyError: numbers are missing.
    """
    heads = _first(config, "num_attention_heads", "decoder_attention_heads")
    layers = _first(config, "num_hidden_layers", "decoder_layers")
    width = 2.0 * (config.get("head_dim") or _first(config, "hidden_size", "d_model") // heads)
    if config.get("kv_lora_rank"):  # DeepSeek's latent attention: other sizes of queries and keys than of values
        width = config["qk_nope_head_dim"] + config["qk_rope_head_dim"] + config["v_head_dim"]
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    kinds = config.get("layer_types") or (["sliding_attention" if window else "full_attention"] * layers)
    whole, windows, chunks = 0.0, 0.0, 0.0
    for kind in kinds[:layers]:
        per_pair = 2.0 * heads * width
        if kind == "full_attention" and config.get("global_head_dim"):  # Gemma 4's heads of these layers are larger
            per_pair = 4.0 * heads * config["global_head_dim"]
        whole += per_pair * (kind == "full_attention" or (kind == "sliding_attention" and not window))
        windows += per_pair * (kind == "sliding_attention" and bool(window))
        chunks += per_pair * (kind == "chunked_attention")
    return AttentionCost(
        whole,
        {window: windows} if window and windows else {},
        {config["attention_chunk_size"]: chunks} if chunks else {},
    )


def _text_cost(config: Mapping[str, Any]) -> float:
    """Forward FLOPs a token, without attention's scores and values."""
    hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
    head_size = config.get("head_dim") or hidden // heads
    groups = config.get("num_key_value_heads") or heads
    attention = hidden * head_size * (2 * heads + 2 * groups)
    experts = config.get("num_experts_per_tok")
    if experts and config.get("moe_intermediate_size"):
        width = experts * config["moe_intermediate_size"] + (config.get("shared_expert_intermediate_size") or 0)
    else:
        width = config["intermediate_size"]
    return 2.0 * (layers * (attention + 3 * hidden * width) + hidden * config["vocab_size"])


def _tower_cost(config: Mapping[str, Any], text_hidden: int) -> tuple[float, float, float]:
    """Forward FLOPs of cutting a patch, of what follows for it, and of a squared patch."""
    layers = config.get("depth") or config["num_hidden_layers"]
    # Qwen2-VL calls the tower's own width embed_dim, and its output's hidden_size
    hidden = config.get("embed_dim") or config["hidden_size"]
    width = config.get("intermediate_size") or int(hidden * config["mlp_ratio"])
    matrices = 3 if config.get("hidden_act") == "silu" else 2
    size, merge = config["patch_size"], config.get("spatial_merge_size") or 1
    per_patch, per_squared_patch = tower_attention_cost(config)
    pixels = (config.get("in_channels") or config.get("in_chans") or config.get("num_channels") or 3) * size**2
    embedding = pixels * (config.get("temporal_patch_size") or 1) * hidden
    output = config.get("out_hidden_size") or text_hidden
    merger = hidden**2 * merge**2 + hidden * output
    per_patch += 2.0 * (layers * (4 * hidden**2 + matrices * hidden * width) + merger)
    return 2.0 * embedding, per_patch, per_squared_patch


def _second_tower_cost(config: Mapping[str, Any], first: Mapping[str, Any]) -> float:
    """Forward FLOPs of SAM's encoder for the same picture in high resolution, for a patch of the first encoder.

    Both have one size of pictures. Windows at the edges are padded to whole ones (Kirillov et al., "Segment Anything",
    arXiv 2304.02643); two outputs pass a neck each, and then two convolutions with strides of 2 that end at the first
    encoder's patches.
    """
    hidden, out, layers = config["hidden_size"], config["output_channels"], config["num_hidden_layers"]
    side, window = config["image_size"] // config["patch_size"], config["window_size"]
    patches, padded = side**2, (-(-side // window) * window) ** 2
    whole = len(config["global_attn_indexes"])
    pixels = (config.get("num_channels") or 3) * config["patch_size"] ** 2
    width = config.get("mlp_dim") or int(hidden * config["mlp_ratio"])
    flops = 2.0 * patches * (pixels * hidden + layers * 2 * hidden * width + 2 * (hidden * out + 9 * out**2))
    for rows, seen, number in ((patches, patches, whole), (padded, window**2, layers - whole)):
        flops += number * rows * (8.0 * hidden**2 + 4.0 * hidden * seen)
    of_first = (first["image_size"] // first["patch_size"]) ** 2
    return flops / of_first + 2 * 2.0 * 9 * (4 * 2 * out**2 + 8 * out**2)


def tower_attention_cost(config: Mapping[str, Any]) -> tuple[float, float]:
    """Return the forward FLOPs of an encoder's scores and values: a patch (of windows), and a squared patch.

    Windows at the edges of pictures are smaller; all count as whole ones.

    Raises:
        KeyError: numbers are missing.
    """
    layers = _first(config, "depth", "encoder_layers", "num_hidden_layers")
    hidden = _first(config, "embed_dim", "d_model", "hidden_size")
    if config.get("window_size") and config.get("fullatt_block_indexes") is not None:
        whole = len(config["fullatt_block_indexes"])
        window = (config["window_size"] // config["patch_size"]) ** 2
        return 4.0 * hidden * (layers - whole) * window, 4.0 * hidden * whole
    return 0.0, 4.0 * hidden * layers


def _first(config: Mapping[str, Any], *names: str) -> int:
    """Return the value of the first of these keys that is there."""
    for name in names:
        if config.get(name):
            return config[name]
    raise KeyError(names[-1])
