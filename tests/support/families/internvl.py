"""InternVL: pictures in tiles, videos as numbered frames, all through one tower."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.support.families import Family, randomize
from tests.support.tiny_vision import VISION, byte_tokenizer, text_config

_TEMPLATE = """{%- for message in messages -%}{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}{{- message.content -}}{%- else -%}{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{- '<IMG_CONTEXT>\\n' -}}
{%- elif part.type == 'video' -%}{{- '<video>\\n' -}}
{%- else -%}{{- part.text -}}{%- endif -%}{%- endfor -%}{%- endif -%}
{{- '<|im_end|>\\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
_TOKENS = {
    "eos_token": "<|im_end|>",
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}


def make(path: Path, text: Mapping[str, Any] = MappingProxyType({"model_type": "qwen2"})) -> Path:
    """A directory with weights; `text`: what the language model's configuration has beside the usual."""
    from transformers import (
        GotOcr2ImageProcessor,
        InternVLConfig,
        InternVLForConditionalGeneration,
        InternVLProcessor,
        InternVLVideoProcessor,
    )

    tokenizer = byte_tokenizer(path, _TOKENS)
    size = {"height": 32, "width": 32}
    image, video = GotOcr2ImageProcessor(size=size, max_patches=4), InternVLVideoProcessor(size=size)
    InternVLProcessor(image, tokenizer, video, image_seq_length=4, chat_template=_TEMPLATE).save_pretrained(path)
    config = InternVLConfig(
        text_config=text_config(tokenizer, **text),
        vision_config=VISION,
        image_token_id=tokenizer.context_image_token_id,
        image_seq_length=4,
    )
    randomize(InternVLForConditionalGeneration(config)).save_pretrained(path)
    return path


def published_1b() -> Any:
    """The configuration of InternVL3 1B."""
    from transformers import InternVLConfig

    text = {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
    text |= {"num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151674}
    return InternVLConfig(text_config=text, vision_config={"attention_bias": True}, tie_word_embeddings=False)


def published_8b() -> Any:
    """The configuration of InternVL3 8B."""
    from transformers import InternVLConfig

    text = {"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
    text |= {"num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 151674}
    return InternVLConfig(text_config=text, vision_config={"attention_bias": True}, tie_word_embeddings=False)


FAMILY = Family(
    make,
    wrap=("model.vision_tower.encoder.layer.{*}", "model.language_model.layers.{*}"),
    kinds=("image", "video"),
    clip_frames=(3,),
    published={"1B": (published_1b, 938_158_976), "8B": (published_8b, 7_944_373_760)},
)
