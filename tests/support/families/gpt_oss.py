"""GPT-OSS: channels in its turns, attention sinks, a window in every other layer shorter than the rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.families import Family
from tests.support.tiny_text import text_dir

_TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>")
TEMPLATE = """{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content -}}
{{- '<|return|>' if loop.last else '<|end|>' -}}
{%- else -%}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' -}}{%- endif -%}
{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}"""


def make(path: Path, **sizes: int) -> Path:
    """A directory with weights; `sizes` are fields of its configuration."""
    from transformers import GptOssConfig, GptOssForCausalLM

    fields = {"head_dim": 24, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
    fields |= {"intermediate_size": 48, **sizes}
    return text_dir(
        path,
        GptOssForCausalLM,
        GptOssConfig,
        fields,
        template=TEMPLATE,
        tokens=_TOKENS,
        special={"eos_token": "<|return|>"},
    )


def published_20b() -> Any:
    """The configuration of gpt-oss-20b."""
    from transformers import GptOssConfig

    return GptOssConfig(num_hidden_layers=24, num_local_experts=32)


def published_120b() -> Any:
    """The configuration of gpt-oss-120b."""
    from transformers import GptOssConfig

    return GptOssConfig(num_hidden_layers=36, num_local_experts=128)


FAMILY = Family(
    make,
    wrap=("model.layers.{*}",),
    published={"20B": (published_20b, 20_914_757_184), "120B": (published_120b, 116_829_156_672)},
)
