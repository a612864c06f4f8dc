"""Mistral Small 3.1: pictures of any shape, written row by row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.families import Family, randomize
from tests.support.tiny_vision import VISION, byte_tokenizer, text_config

_TEMPLATE = """{{- bos_token -}}{%- for message in messages -%}
{%- if message.role == 'user' -%}{{- '[INST]' -}}
{%- if message.content is string -%}{{- message.content -}}{%- else -%}{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{- '[IMG]' -}}{%- else -%}{{- part.text -}}{%- endif -%}
{%- endfor -%}{%- endif -%}{{- '[/INST]' -}}
{%- else -%}
{%- if message.content is string -%}{{- message.content -}}{%- else -%}{{- message.content[0].text -}}{%- endif -%}
{{- eos_token -}}
{%- endif -%}{%- endfor -%}"""
_TOKENS = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "inst_token": "[INST]",
    "end_inst_token": "[/INST]",
    "img_token": "[IMG]",
    "img_break_token": "[IMG_BREAK]",
    "img_end_token": "[IMG_END]",
}


def make(path: Path) -> Path:
    """A directory with weights."""
    from transformers import (
        Mistral3Config,
        Mistral3ForConditionalGeneration,
        PixtralImageProcessor,
        PixtralProcessor,
    )

    tokenizer = byte_tokenizer(path, _TOKENS, adds_bos=True)
    image = PixtralImageProcessor(size={"longest_edge": 64}, patch_size={"height": 8, "width": 8})
    PixtralProcessor(image, tokenizer, patch_size=8, spatial_merge_size=2, chat_template=_TEMPLATE).save_pretrained(
        path
    )
    config = Mistral3Config(
        text_config={"model_type": "mistral", **text_config(tokenizer), "sliding_window": None},
        vision_config={"model_type": "pixtral", **VISION, "image_size": 64, "head_dim": 16},
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
        spatial_merge_size=2,
        tie_word_embeddings=False,
    )
    randomize(Mistral3ForConditionalGeneration(config)).save_pretrained(path)
    return path


def published_24b() -> Any:
    """The configuration of Mistral Small 3.1."""
    from transformers import Mistral3Config

    return Mistral3Config(tie_word_embeddings=False)


FAMILY = Family(
    make,
    wrap=("model.vision_tower.transformer.layers.{*}", "model.language_model.layers.{*}"),
    kinds=("image",),
    published={"24B": (published_24b, 24_011_361_280)},
)
