"""Qwen3-VL with experts, in the hub's layout: each expert's matrices lie transposed to the modules'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from tests.support.families import Family, randomize
from tests.support.families.qwen3_vl import TEXT, VISION, ids_of, processor_dir, published_tower

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": []}


def make(path: Path) -> Path:
    """A directory with weights."""
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    tokenizer = processor_dir(path)
    text = {**TEXT, **EXPERTS, "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3VLMoeConfig(text_config=text, vision_config=VISION, tie_word_embeddings=False, **ids_of(tokenizer))
    randomize(Qwen3VLMoeForConditionalGeneration(config)).save_pretrained(path)
    file = path / "model.safetensors"
    tensors = {
        name: tensor.transpose(1, 2).contiguous() if ".mlp.experts." in name else tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    return path


def published(hidden: int, intermediate: int, expert: int, layers: int, heads: int) -> Any:
    """The configuration of a published size; `expert` is the intermediate size of an expert."""
    from transformers import Qwen3VLMoeConfig

    text = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    text |= {"num_attention_heads": heads, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936}
    text |= {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": expert}
    return Qwen3VLMoeConfig(text_config=text, vision_config=published_tower(hidden), tie_word_embeddings=False)


FAMILY = Family(
    make,
    wrap=("model.visual.blocks.{*}", "model.language_model.layers.{*}"),
    kinds=("image", "video"),
    published={
        "30B-A3B": (lambda: published(2048, 6144, 768, 48, 32), 31_070_754_032),
        # the language model is that of Qwen3-235B-A22B, of 235,093,634,560 parameters; the rest is the tower
        "235B-A22B": (lambda: published(4096, 12288, 1536, 94, 64), 235_093_634_560 + 576_388_336),
    },
)
