"""InternVL3.5 with experts (30B-A3B): the family's class around a Qwen3-MoE language model."""

from __future__ import annotations

import functools
from typing import Any

from tests.support.families import Family
from tests.support.families.internvl import FAMILY as DENSE
from tests.support.families.internvl import make

_TEXT: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}


def published_30b_a3b() -> Any:
    """The configuration of InternVL3.5 30B-A3B."""
    from transformers import InternVLConfig

    text = {"model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32}
    text |= {"num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8}
    text |= {"moe_intermediate_size": 768, "vocab_size": 151936}
    return InternVLConfig(text_config=text, vision_config={"attention_bias": True}, tie_word_embeddings=False)


FAMILY = Family(
    functools.partial(make, text=_TEXT),
    wrap=DENSE.wrap,
    kinds=DENSE.kinds,
    clip_frames=DENSE.clip_frames,
    published={"30B-A3B": (published_30b_a3b, 30_848_000_000)},
)
