"""Qwen3 with experts (text), one of its layers without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.families import Family
from tests.support.tiny_text import text_dir


def make(path: Path) -> Path:
    """A directory with weights."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
    fields = {**experts, "num_hidden_layers": 3, "mlp_only_layers": [1], "head_dim": 24, "tie_word_embeddings": False}
    return text_dir(path, Qwen3MoeForCausalLM, Qwen3MoeConfig, fields)


def _published(hidden: int, layers: int, heads: int, expert: int) -> Any:
    from transformers import Qwen3MoeConfig

    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "head_dim": 128}
    sizes |= {"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": expert}
    return Qwen3MoeConfig(**sizes, vocab_size=151936, mlp_only_layers=[], tie_word_embeddings=False)


def published_30b() -> Any:
    """The configuration of Qwen3 30B-A3B."""
    return _published(2048, 48, 32, 768)


def published_235b() -> Any:
    """The configuration of Qwen3 235B-A22B."""
    return _published(4096, 94, 64, 1536)


FAMILY = Family(
    make,
    wrap=("model.layers.{*}",),
    published={"30B-A3B": (published_30b, 30_532_122_624), "235B-A22B": (published_235b, 235_093_634_560)},
)
