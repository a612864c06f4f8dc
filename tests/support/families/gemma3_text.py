"""Gemma 3 (text): one layer with a window, one without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.families import Family, randomize
from tests.support.tiny_vision import byte_tokenizer, text_config

TEMPLATE = """{{- bos_token -}}{%- for message in messages -%}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' -}}
{%- if message.content is string -%}{{- message.content -}}{%- else -%}{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{- '<start_of_image>' -}}{%- else -%}{{- part.text -}}{%- endif -%}
{%- endfor -%}{%- endif -%}
{{- '<end_of_turn>\\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}"""
TOKENS = {
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "start_of_turn_token": "<start_of_turn>",
    "end_of_turn_token": "<end_of_turn>",
}


def windows(tokenizer: Any) -> dict[str, Any]:
    """The text model's configuration."""
    return text_config(
        tokenizer,
        sliding_window=18,
        query_pre_attn_scalar=24,
        layer_types=["sliding_attention", "full_attention"],
    )


def make(path: Path) -> Path:
    """A directory with weights."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    tokenizer = byte_tokenizer(path, TOKENS, adds_bos=True)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    randomize(Gemma3ForCausalLM(Gemma3TextConfig(**windows(tokenizer)))).save_pretrained(path)
    return path


def published_1b() -> Any:
    """The configuration of Gemma 3 1B."""
    from transformers import Gemma3TextConfig

    sizes = {"hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4}
    return Gemma3TextConfig(**sizes, num_key_value_heads=1, head_dim=256, vocab_size=262144)


FAMILY = Family(
    make,
    wrap=("model.layers.{*}",),
    published={"1B": (published_1b, 999_885_952)},
)
