"""Qwen2 and Qwen2.5 (text), with the output layer tied to the embedding, as in their smaller sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.families import Family
from tests.support.tiny_text import text_dir


def make(path: Path) -> Path:
    """A directory with weights."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return text_dir(path, Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True})


def published_05b() -> Any:
    """The configuration of Qwen2.5 0.5B."""
    from transformers import Qwen2Config

    sizes = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
    return Qwen2Config(**sizes, num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True)


def published_7b() -> Any:
    """The configuration of Qwen2.5 7B."""
    from transformers import Qwen2Config

    sizes = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
    return Qwen2Config(**sizes, num_key_value_heads=4, vocab_size=152064, tie_word_embeddings=False)


FAMILY = Family(
    make,
    wrap=("model.layers.{*}",),
    published={"2.5 0.5B": (published_05b, 494_032_768), "2.5 7B": (published_7b, 7_615_616_512)},
)
