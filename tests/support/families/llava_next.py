"""LLaVA-NeXT (1.6): Mistral's turns, pictures in tiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.families import Family, randomize
from tests.support.families.llava import TOKENS
from tests.support.tiny_vision import VISION, byte_tokenizer, text_config

PINPOINTS = [[32, 64], [64, 32], [64, 64], [96, 32], [32, 96]]
_TEMPLATE = """{%- for message in messages -%}
{%- if message.role == 'user' -%}{{- '[INST] ' -}}
{%- for part in message.content if part.type == 'image' -%}{{- '<image>\\n' -}}{%- endfor -%}
{%- for part in message.content if part.type == 'text' -%}{{- part.text -}}{%- endfor -%}
{{- ' [/INST]' -}}
{%- else -%}
{%- for part in message.content if part.type == 'text' -%}{{- ' ' + part.text + '</s> ' -}}{%- endfor -%}
{%- endif -%}{%- endfor -%}"""


def make(path: Path) -> Path:
    """A directory with weights."""
    from transformers import (
        LlavaNextConfig,
        LlavaNextForConditionalGeneration,
        LlavaNextImageProcessor,
        LlavaNextProcessor,
    )

    tokenizer = byte_tokenizer(path, TOKENS, adds_bos=True)
    image = LlavaNextImageProcessor(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}, image_grid_pinpoints=PINPOINTS
    )
    LlavaNextProcessor(
        image,
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=_TEMPLATE,
    ).save_pretrained(path)
    config = LlavaNextConfig(
        text_config={"model_type": "mistral", **text_config(tokenizer)},
        vision_config={"model_type": "clip_vision_model", **VISION, "num_hidden_layers": 3, "projection_dim": 40},
        image_token_index=tokenizer.image_token_id,
        image_grid_pinpoints=PINPOINTS,
    )
    randomize(LlavaNextForConditionalGeneration(config)).save_pretrained(path)
    return path


def published_7b() -> Any:
    """The configuration of LLaVA 1.6 with Mistral 7B."""
    from transformers import LlavaNextConfig

    text = {"model_type": "mistral", "vocab_size": 32064, "intermediate_size": 14336, "num_key_value_heads": 8}
    return LlavaNextConfig(text_config=text)


FAMILY = Family(
    make,
    wrap=("model.vision_tower.encoder.layers.{*}", "model.language_model.layers.{*}"),
    kinds=("image",),
    published={"7B": (published_7b, 7_566_747_648)},
)
