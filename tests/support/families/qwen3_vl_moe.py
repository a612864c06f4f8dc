"""Qwen3-VL with experts, in the hub's layout: each expert's matrices lie transposed to the modules'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from tests.support.families import Family, randomize
from tests.support.families.qwen3_vl import TEXT, VISION, ids_of, processor_dir

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


def published_30b() -> Any:
    """The configuration of Qwen3-VL 30B-A3B."""
    from transformers import Qwen3VLMoeConfig

    text = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32}
    text |= {"num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936}
    text |= {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    vision = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "out_hidden_size": 2048}
    vision |= {"deepstack_visual_indexes": [8, 16, 24]}
    return Qwen3VLMoeConfig(text_config=text, vision_config=vision, tie_word_embeddings=False)


FAMILY = Family(
    make,
    wrap=("model.visual.blocks.{*}", "model.language_model.layers.{*}"),
    kinds=("image", "video"),
    published={"30B-A3B": (published_30b, 31_070_754_032)},
)
