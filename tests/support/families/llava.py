"""LLaVA 1.5: pictures before the words, answers without a token at their end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.families import Family, randomize
from tests.support.tiny_vision import VISION, byte_tokenizer, text_config

TEMPLATE = """{%- for message in messages -%}
{%- if message.role != 'system' -%}{{- message.role.upper() + ': ' -}}{%- endif -%}
{%- for part in message.content if part.type == 'image' -%}{{- '<image>\\n' -}}{%- endfor -%}
{%- for part in message.content if part.type == 'text' -%}
{%- if message.role == 'assistant' -%}{%- generation -%}{{- part.text + ' ' -}}{%- endgeneration -%}
{%- else -%}{{- part.text + ' ' -}}{%- endif -%}
{%- endfor -%}{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'ASSISTANT:' -}}{%- endif -%}"""
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "image_token": "<image>"}


def make(path: Path) -> Path:
    """A directory with weights."""
    from transformers import CLIPImageProcessor, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor

    tokenizer = byte_tokenizer(path, TOKENS, adds_bos=True)
    image = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    LlavaProcessor(
        image,
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    ).save_pretrained(path)
    config = LlavaConfig(
        text_config={"model_type": "llama", **text_config(tokenizer)},
        vision_config={"model_type": "clip_vision_model", **VISION, "num_hidden_layers": 3, "projection_dim": 40},
        image_token_index=tokenizer.image_token_id,
        image_seq_length=16,
    )
    randomize(LlavaForConditionalGeneration(config)).save_pretrained(path)
    return path


def published_7b() -> Any:
    """The configuration of LLaVA 1.5 7B."""
    from transformers import LlavaConfig

    return LlavaConfig(text_config={"model_type": "llama", "vocab_size": 32064})


FAMILY = Family(
    make,
    wrap=("model.vision_tower.encoder.layers.{*}", "model.language_model.layers.{*}"),
    kinds=("image",),
    published={"7B": (published_7b, 7_063_427_072)},
)
