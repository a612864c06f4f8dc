"""Qwen3.5: Qwen3-VL's rows, a tower without deepstack, and a layer of linear attention before one of full attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.families import Family, randomize
from tests.support.families.qwen3_vl import VISION as QWEN3_VL_VISION
from tests.support.families.qwen3_vl import ids_of, processor_dir

TEXT = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 2048,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 3, 3],
        "mrope_interleaved": True,
    },
}
VISION = {key: value for key, value in QWEN3_VL_VISION.items() if not key.startswith("deepstack")}


WRAP = (
    "model.visual",
    "model.visual.blocks.{*}",
    "model.language_model.embed_tokens",
    "model.language_model",
    "model.language_model.layers.{*}",
    "lm_head",
)


def remembering(model: Any) -> Any:
    """Let the states of linear attention last for many tokens: what leaks into a sample then shows in all of it."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.sub_(3.0)
    return model


def make(path: Path) -> Path:
    """A directory with weights."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    tokenizer = processor_dir(path)
    text = {**TEXT, "intermediate_size": 96, "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3_5Config(text_config=text, vision_config=VISION, **ids_of(tokenizer))
    remembering(randomize(Qwen3_5ForConditionalGeneration(config))).save_pretrained(path)
    return path


def published(hidden: int, intermediate: int, layers: int, heads: int, value_heads: int, depth: int = 27) -> Any:
    """The configuration of a published size; `value_heads` are those of linear attention, `depth` that of the tower."""
    from transformers import Qwen3_5Config

    text = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    text |= {"num_attention_heads": heads, "linear_num_value_heads": value_heads}
    tower = {"depth": depth, "out_hidden_size": hidden}
    if depth == 24:
        tower |= {"hidden_size": 1024, "intermediate_size": 4096}
    return Qwen3_5Config(text_config=text, vision_config=tower, tie_word_embeddings=depth == 24)


FAMILY = Family(
    make,
    wrap=WRAP,
    kinds=("image", "video"),
    flags={"micro_batch_size": 2},
    # language models as llama.cpp counts those of the published files, in units of 10 million; the rest is the tower
    published={
        "4B": (lambda: published(2560, 9216, 32, 16, 32, depth=24), 4_210_000_000 + 333_514_240),
        "9B": (lambda: published(4096, 12288, 32, 16, 32), 8_950_000_000 + 456_010_480),
        "27B": (lambda: published(5120, 17408, 64, 24, 48), 26_900_000_000 + 460_730_096),
    },
)
