"""DeepSeek-VL: turns without tokens of their own, an end token behind each answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.families import Family, randomize
from tests.support.tiny_vision import VISION, byte_tokenizer, text_config

TEMPLATE = """{%- for message in messages -%}
{{- ('User: ' if message.role == 'user' else 'Assistant: ') -}}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{- '<image_placeholder>' -}}{%- else -%}{{- part.text -}}{%- endif -%}
{%- endfor -%}
{%- if not loop.last -%}{{- ('\\n\\n' if message.role == 'user' else eos_token) -}}{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '\\n\\nAssistant: ' -}}{%- endif -%}"""
TOKENS = {
    "bos_token": "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
    "eos_token": "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "image_token": "<image_placeholder>",
}


def siglip() -> dict[str, Any]:
    """The tower's configuration."""
    return {"model_type": "siglip_vision_model", **VISION, "vision_use_head": False}


def make(path: Path) -> Path:
    """A directory with weights."""
    from transformers import (
        DeepseekVLConfig,
        DeepseekVLForConditionalGeneration,
        DeepseekVLImageProcessor,
        DeepseekVLProcessor,
    )

    tokenizer = byte_tokenizer(path, TOKENS, adds_bos=True)
    image = DeepseekVLImageProcessor(size={"height": 32, "width": 32})
    DeepseekVLProcessor(image, tokenizer, chat_template=TEMPLATE, num_image_tokens=16).save_pretrained(path)
    config = DeepseekVLConfig(
        text_config={"model_type": "llama", **text_config(tokenizer)},
        vision_config=siglip(),
        image_token_id=tokenizer.image_token_id,
        tie_word_embeddings=False,
    )
    randomize(DeepseekVLForConditionalGeneration(config)).save_pretrained(path)
    return path


FAMILY = Family(
    make,
    wrap=("model.vision_model.encoder.layers.{*}", "model.language_model.layers.{*}"),
    kinds=("image",),
)
