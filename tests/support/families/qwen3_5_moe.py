"""Qwen3.5 with experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.families import Family, randomize
from tests.support.families.qwen3_5 import TEXT, VISION, WRAP, remembering
from tests.support.families.qwen3_vl import ids_of, processor_dir

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def make(path: Path) -> Path:
    """A directory with weights."""
    from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

    tokenizer = processor_dir(path)
    text = {**TEXT, **EXPERTS, "shared_expert_intermediate_size": 40}
    text |= {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3_5MoeConfig(text_config=text, vision_config=VISION, **ids_of(tokenizer))
    remembering(randomize(Qwen3_5MoeForConditionalGeneration(config))).save_pretrained(path)
    return path


def published(hidden: int, layers: int, heads: int, value_heads: int, experts: int, expert: int) -> Any:
    """The configuration of a published size; `expert` is the intermediate size of an expert and of the shared one."""
    from transformers import Qwen3_5MoeConfig

    text = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    text |= {"linear_num_value_heads": value_heads, "num_experts": experts, "moe_intermediate_size": expert}
    text |= {"shared_expert_intermediate_size": expert, "num_experts_per_tok": 10 if experts == 512 else 8}
    return Qwen3_5MoeConfig(text_config=text, vision_config={"out_hidden_size": hidden})


FAMILY = Family(
    make,
    wrap=(*WRAP, "model.language_model.layers.{*}.linear_attn", "model.language_model.layers.{*}.mlp.experts"),
    kinds=("image", "video"),
    flags={"micro_batch_size": 2},
    # language models as llama.cpp counts those of the published files, in units of 10 million; the rest is the tower
    published={
        "35B-A3B": (lambda: published(2048, 40, 16, 32, 256, 512), 34_660_000_000 + 446_571_248),
        "122B-A10B": (lambda: published(3072, 48, 32, 64, 256, 1024), 122_110_000_000 + 451_290_864),
        "397B-A17B": (lambda: published(4096, 60, 32, 64, 512, 1024), 396_350_000_000 + 456_010_480),
    },
)
