"""Mixtral: instructions in brackets, experts stored one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.families import Family
from tests.support.tiny_text import text_dir

_TOKENS = ("<s>", "</s>")
_TEMPLATE = """{{- bos_token -}}{%- for message in messages -%}
{%- if message.role == 'user' -%}{{- '[INST] ' + message.content + ' [/INST]' -}}
{%- else -%}{{- ' ' + message.content + eos_token -}}{%- endif -%}{%- endfor -%}"""


def make(path: Path) -> Path:
    """A directory with weights."""
    from transformers import MixtralConfig, MixtralForCausalLM

    fields = {"num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False}
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return text_dir(
        path, MixtralForCausalLM, MixtralConfig, fields, template=_TEMPLATE, tokens=_TOKENS, special=special
    )


def published_8x7b() -> Any:
    """The configuration of Mixtral 8x7B."""
    from transformers import MixtralConfig

    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    return MixtralConfig(**sizes, num_key_value_heads=8, vocab_size=32000, num_local_experts=8)


FAMILY = Family(make, wrap=("model.layers.{*}",), published={"8x7B": (published_8x7b, 46_702_792_704)})
