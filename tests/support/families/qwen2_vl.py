"""Qwen2-VL: images and videos."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.families import Family, randomize
from tests.support.families.qwen3_vl import CHAT_TEMPLATE, ids_of
from tests.support.tiny import tiny_qwen3_dir

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
}


def make(path: Path) -> Path:
    """A directory with weights."""
    from transformers import (
        AutoTokenizer,
        Qwen2VLConfig,
        Qwen2VLForConditionalGeneration,
        Qwen2VLImageProcessor,
        Qwen2VLProcessor,
        Qwen2VLVideoProcessor,
    )

    tokenizer = AutoTokenizer.from_pretrained(tiny_qwen3_dir(path, weights=False))
    size = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 16}
    image, video = Qwen2VLImageProcessor(size=size), Qwen2VLVideoProcessor(size=size)
    Qwen2VLProcessor(image, tokenizer, video, chat_template=CHAT_TEMPLATE).save_pretrained(path)
    text = {**TEXT, "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 3}
    config = Qwen2VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **ids_of(tokenizer))
    randomize(Qwen2VLForConditionalGeneration(config)).save_pretrained(path)
    return path


def published(hidden: int, intermediate: int, layers: int, heads: int, groups: int, vocabulary: int, tie: bool) -> Any:
    """The configuration of a published size."""
    from transformers import Qwen2VLConfig

    text = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    text |= {"num_attention_heads": heads, "num_key_value_heads": groups, "vocab_size": vocabulary}
    vision = {"depth": 32, "embed_dim": 1280, "hidden_size": hidden, "num_heads": 16}
    return Qwen2VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=tie)


FAMILY = Family(
    make,
    wrap=("model.visual.blocks.{*}", "model.language_model.layers.{*}"),
    kinds=("image", "video"),
    published={
        "2B": (lambda: published(1536, 8960, 28, 12, 2, 151936, True), 2_208_985_600),
        "7B": (lambda: published(3584, 18944, 28, 28, 4, 152064, False), 8_291_375_616),
    },
)
