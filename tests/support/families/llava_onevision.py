"""LLaVA-OneVision: pictures in tiles and clips, before the words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.families import Family, randomize
from tests.support.families.deepseek_vl import siglip
from tests.support.families.llava_next import PINPOINTS
from tests.support.tiny_vision import byte_tokenizer, text_config

_TEMPLATE = """{%- for message in messages -%}{{- '<|im_start|>' + message.role + ' ' -}}
{%- for part in message.content if part.type == 'image' -%}{{- '<image>' -}}{%- endfor -%}
{%- for part in message.content if part.type == 'video' -%}{{- '<video>' -}}{%- endfor -%}
{%- for part in message.content if part.type == 'text' -%}
{%- if message.role == 'assistant' -%}{%- generation -%}{{- '\\n' + part.text -}}{%- endgeneration -%}
{%- else -%}{{- '\\n' + part.text -}}{%- endif -%}{%- endfor -%}
{{- '<|im_end|>' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
_TOKENS = {"eos_token": "<|im_end|>", "image_token": "<image>", "video_token": "<video>"}


def make(path: Path) -> Path:
    """A directory with weights."""
    from transformers import (
        LlavaOnevisionConfig,
        LlavaOnevisionForConditionalGeneration,
        LlavaOnevisionImageProcessor,
        LlavaOnevisionProcessor,
        LlavaOnevisionVideoProcessor,
    )

    tokenizer = byte_tokenizer(path, _TOKENS)
    size = {"height": 32, "width": 32}
    grid = [[32, 32], *PINPOINTS, [128, 128]]
    LlavaOnevisionProcessor(
        LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=grid),
        tokenizer,
        LlavaOnevisionVideoProcessor(size=size),
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_4",
        chat_template=_TEMPLATE,
    ).save_pretrained(path)
    config = LlavaOnevisionConfig(
        text_config={"model_type": "qwen2", **text_config(tokenizer)},
        vision_config=siglip(),
        image_token_index=tokenizer.image_token_id,
        video_token_index=tokenizer.video_token_id,
        image_grid_pinpoints=grid,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_4",
    )
    randomize(LlavaOnevisionForConditionalGeneration(config)).save_pretrained(path)
    return path


def published_7b() -> Any:
    """The configuration of LLaVA-OneVision 7B."""
    from transformers import LlavaOnevisionConfig

    text = {"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
    text |= {"num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152000}
    vision = {"model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "image_size": 384}
    vision |= {"num_hidden_layers": 26, "num_attention_heads": 16, "patch_size": 14, "vision_use_head": False}
    return LlavaOnevisionConfig(text_config=text, vision_config=vision, tie_word_embeddings=False)


FAMILY = Family(
    make,
    wrap=("model.vision_tower.encoder.layers.{*}", "model.language_model.layers.{*}"),
    kinds=("image", "video"),
    clip_frames=(3,),
    published={"7B": (published_7b, 8_030_348_832)},
)
