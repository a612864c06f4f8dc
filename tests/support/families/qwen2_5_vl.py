"""Qwen2.5-VL: images, and videos whose times are in the positions."""

from __future__ import annotations

from typing import Any

from tests.support.families import Family
from tests.support.tiny import tiny_qwen2_5_vl_dir


def published(
    hidden: int, intermediate: int, layers: int, heads: int, groups: int, *, vision: int = 3420, tie: bool = False
) -> Any:
    """The configuration of a published size; `vision` is the intermediate size of the tower."""
    from transformers import Qwen2_5_VLConfig

    text = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    text |= {"num_attention_heads": heads, "num_key_value_heads": groups, "vocab_size": 151936 if tie else 152064}
    rope = {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6}
    text |= {"rms_norm_eps": 1e-6, "rope_parameters": rope}
    tower = {"depth": 32, "hidden_size": 1280, "intermediate_size": vision, "num_heads": 16, "out_hidden_size": hidden}
    return Qwen2_5_VLConfig(text_config=text, vision_config={**tower, "tokens_per_second": 2}, tie_word_embeddings=tie)


FAMILY = Family(
    tiny_qwen2_5_vl_dir,
    wrap=("model.visual.blocks.{*}", "model.language_model.layers.{*}"),
    kinds=("image", "video"),
    published={
        "3B": (lambda: published(2048, 11008, 36, 16, 2, tie=True), 3_754_622_976),
        "7B": (lambda: published(3584, 18944, 28, 28, 4), 8_292_166_656),
        "32B": (lambda: published(5120, 27648, 64, 40, 8, vision=3456), 33_452_718_336),
        "72B": (lambda: published(8192, 29568, 80, 64, 8, vision=3456), 73_410_777_344),
    },
)
