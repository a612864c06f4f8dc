"""Qwen3 (text), with heads wider than the hidden size gives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.families import Family
from tests.support.tiny_text import text_dir


def make(path: Path) -> Path:
    """A directory with weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return text_dir(path, Qwen3ForCausalLM, Qwen3Config, {"head_dim": 24, "tie_word_embeddings": False})


def _published(hidden: int, intermediate: int, layers: int, heads: int, tie: bool) -> Any:
    from transformers import Qwen3Config

    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers, "head_dim": 128}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": 8, "vocab_size": 151936}
    return Qwen3Config(**sizes, tie_word_embeddings=tie)


def published_06b() -> Any:
    """The configuration of Qwen3 0.6B."""
    return _published(1024, 3072, 28, 16, True)


def published_8b() -> Any:
    """The configuration of Qwen3 8B."""
    return _published(4096, 12288, 36, 32, False)


def published_32b() -> Any:
    """The configuration of Qwen3 32B."""
    return _published(5120, 25600, 64, 64, False)


FAMILY = Family(
    make,
    wrap=("model.layers.{*}",),
    published={
        "0.6B": (published_06b, 596_049_920),
        "8B": (published_8b, 8_190_735_360),
        "32B": (published_32b, 32_762_123_264),
    },
)
