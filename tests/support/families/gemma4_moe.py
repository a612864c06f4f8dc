"""Gemma 4 in its larger sizes: experts, images whose tokens see each other in layers with a window, no sounds."""

from __future__ import annotations

from pathlib import Path

from tests.support.families import Family
from tests.support.families.gemma4 import make_size

_TEXT = {
    "use_bidirectional_attention": "vision",
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 2,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
}


def make(path: Path) -> Path:
    """A directory with weights."""
    return make_size(path, _TEXT, {"standardize": True}, None)


FAMILY = Family(
    make,
    wrap=("model.vision_tower.encoder.layers.{*}", "model.language_model.layers.{*}"),
    kinds=("image", "video"),
    flags={"micro_batch_size": 2},
)
