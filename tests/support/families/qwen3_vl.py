"""Qwen3-VL: images, and videos with a time before every two frames."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.families import Family, randomize
from tests.support.tiny import tiny_qwen3_dir

CHAT_TEMPLATE = """{%- for message in messages -%}{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}{{- message.content -}}{%- else -%}{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part.type == 'video' -%}{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- else -%}{{- part.text -}}{%- endif -%}{%- endfor -%}{%- endif -%}
{{- '<|im_end|>\\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""


def processor_dir(path: Path) -> Any:
    """Save a Qwen3-VL processor with a small tokenizer in `path`; returns the tokenizer."""
    from transformers import AutoTokenizer, Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    tokenizer = AutoTokenizer.from_pretrained(tiny_qwen3_dir(path, weights=False))
    size = {"shortest_edge": 32 * 32, "longest_edge": 32 * 32 * 16}
    image = Qwen2VLImageProcessor(patch_size=16, size=size)
    video = Qwen3VLVideoProcessor(patch_size=16, size=size)
    Qwen3VLProcessor(image, tokenizer, video, chat_template=CHAT_TEMPLATE).save_pretrained(path)
    return tokenizer


def ids_of(tokenizer: Any) -> dict[str, int]:
    """Token ids that the configuration names."""
    names = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
    names |= {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
    return {key: tokenizer.convert_tokens_to_ids(token) for key, token in names.items()}


TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "mrope_section": [2, 3, 3],
        "mrope_interleaved": True,
    },
}
VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0],
}


def make(path: Path) -> Path:
    """A directory with weights."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    tokenizer = processor_dir(path)
    text = {**TEXT, "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3VLConfig(text_config=text, vision_config=VISION, **ids_of(tokenizer))
    randomize(Qwen3VLForConditionalGeneration(config)).save_pretrained(path)
    return path


def published(hidden: int, intermediate: int, layers: int, heads: int) -> Any:
    """The configuration of a published size."""
    from transformers import Qwen3VLConfig

    text = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    text |= {"num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
    return Qwen3VLConfig(text_config=text, vision_config=published_tower(hidden), tie_word_embeddings=False)


def published_tower(hidden: int) -> dict[str, Any]:
    """The vision tower of the sizes from 8B on, which differ in the language model's hidden size."""
    tower = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "out_hidden_size": hidden}
    return {**tower, "deepstack_visual_indexes": [8, 16, 24]}


FAMILY = Family(
    make,
    wrap=("model.visual.blocks.{*}", "model.language_model.layers.{*}"),
    kinds=("image", "video"),
    published={
        "8B": (lambda: published(4096, 12288, 36, 32), 8_767_123_696),
        # the language model is that of Qwen3-32B, of 32,762,123,264 parameters; the rest is the tower
        "32B": (lambda: published(5120, 25600, 64, 64), 32_762_123_264 + 595_266_800),
    },
)
