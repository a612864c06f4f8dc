"""Llama 3: headers of their own for every turn, three-part rotary scaling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.families import Family
from tests.support.tiny_text import text_dir

_TOKENS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_TEMPLATE = """{{- bos_token -}}{%- for message in messages -%}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}"""
_ROPE = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_ROPE |= {"original_max_position_embeddings": 64}


def make(path: Path) -> Path:
    """A directory with weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    special = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
    fields = {"rope_parameters": _ROPE, "tie_word_embeddings": False}
    return text_dir(path, LlamaForCausalLM, LlamaConfig, fields, template=_TEMPLATE, tokens=_TOKENS, special=special)


def published_8b() -> Any:
    """The configuration of Llama 3.1 8B."""
    from transformers import LlamaConfig

    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    return LlamaConfig(**sizes, num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=False)


def published_70b() -> Any:
    """The configuration of Llama 3.3 70B."""
    from transformers import LlamaConfig

    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    return LlamaConfig(**sizes, num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=False)


FAMILY = Family(
    make,
    wrap=("model.layers.{*}",),
    published={"3.1 8B": (published_8b, 8_030_261_248), "3.3 70B": (published_70b, 70_553_706_496)},
)
