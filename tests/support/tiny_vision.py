"""Directories of families that see: the small byte tokenizer with a family's own tokens, towers of two layers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.tiny import tiny_qwen3_dir

TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 2048,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}


def byte_tokenizer(path: Path, tokens: Mapping[str, str], adds_bos: bool = False) -> Any:
    """A fast tokenizer over bytes with special tokens of a family.

    Args:
        path: a folder of its own; what is saved there is overwritten later by the processor.
        tokens: name of each token (bos_token, eos_token, image_token, …) → its text. What has a name that transformers
            doesn't know becomes an attribute of the tokenizer, and an entry of its configuration, under that name.
        adds_bos: whether it begins every text with bos_token, unless told not to add special tokens.
    """
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    known = {"bos_token", "eos_token", "pad_token", "unk_token"}
    base = AutoTokenizer.from_pretrained(tiny_qwen3_dir(path, weights=False)).backend_tokenizer
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=base,
        extra_special_tokens={name: text for name, text in tokens.items() if name not in known},
        **{"pad_token": "<|endoftext|>", **{name: text for name, text in tokens.items() if name in known}},
    )
    if adds_bos:
        bos = tokens["bos_token"]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.convert_tokens_to_ids(bos))]
        )
    return tokenizer


def text_config(tokenizer: Any, **fields: Any) -> dict[str, Any]:
    """TEXT with the tokenizer's vocabulary and `fields`."""
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {**TEXT, "vocab_size": len(tokenizer), **ids, **fields}
