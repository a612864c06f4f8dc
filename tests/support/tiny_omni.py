"""A Qwen2.5-Omni processor without a model: text, images, videos and sounds in one row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.tiny import tiny_qwen2_5_vl_dir

_NAMES = {
    "image_token": "<|IMAGE|>",
    "video_token": "<|VIDEO|>",
    "audio_token": "<|AUDIO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
_TEMPLATE = """{%- for message in messages -%}{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}{{- message.content -}}{%- else -%}{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{- '<|vision_bos|><|IMAGE|><|vision_eos|>' -}}
{%- elif part.type == 'video' -%}{{- '<|vision_bos|><|VIDEO|><|vision_eos|>' -}}
{%- elif part.type == 'audio' -%}{{- '<|audio_bos|><|AUDIO|><|audio_eos|>' -}}
{%- else -%}{{- part.text -}}{%- endif -%}{%- endfor -%}{%- endif -%}
{{- '<|im_end|>\\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""


def tiny_omni_processor_dir(path: Path, seconds: int = 300) -> Path:
    """Make a directory with the processor, and nothing else.

    Args:
        path: the directory to make.
        seconds: longest sound that the feature extractor takes (30: a Whisper window).
    """
    from transformers import (
        AutoTokenizer,
        Qwen2_5OmniProcessor,
        Qwen2Tokenizer,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
        WhisperFeatureExtractor,
    )

    plain = tiny_qwen2_5_vl_dir(path / "tokenizer", weights=False)
    AutoTokenizer.from_pretrained(plain).save_pretrained(path / "tokenizer")
    tokenizer = Qwen2Tokenizer.from_pretrained(path / "tokenizer", extra_special_tokens=_NAMES)
    size = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 64}
    sound: Any = WhisperFeatureExtractor(feature_size=128, chunk_length=seconds, padding_side="right")
    parts = Qwen2VLImageProcessor(size=size), Qwen2VLVideoProcessor(size=size), sound, tokenizer
    Qwen2_5OmniProcessor(*parts, chat_template=_TEMPLATE).save_pretrained(path / "model")
    return path / "model"
