"""Qwen2.5-VL: images, and videos whose times are in the positions."""

from __future__ import annotations

from typing import Any

from tests.support.families import Family
from tests.support.tiny import tiny_qwen2_5_vl_dir


def published(hidden: int, intermediate: int, layers: int, heads: int, groups: int, vocabulary: int, tie: bool) -> Any:
    """The configuration of a published size."""
    from transformers import Qwen2_5_VLConfig

    text = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    text |= {"num_attention_heads": heads, "num_key_value_heads": groups, "vocab_size": vocabulary}
    vision = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": hidden}
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=tie)


FAMILY = Family(
    tiny_qwen2_5_vl_dir,
    wrap=("model.visual.blocks.{*}", "model.language_model.layers.{*}"),
    kinds=("image", "video"),
    published={
        "3B": (lambda: published(2048, 11008, 36, 16, 2, 151936, True), 3_754_622_976),
        "7B": (lambda: published(3584, 18944, 28, 28, 4, 152064, False), 8_292_166_656),
    },
)
