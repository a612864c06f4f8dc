"""Step-3.7: images with crops, a dense layer with a window before one of experts; in the hub's layout."""

from __future__ import annotations

from pathlib import Path

from tests.support.families import Family, randomize
from tests.support.tiny_vision import byte_tokenizer, text_config

_TOKENS = {
    "bos_token": "<｜begin▁of▁sentence｜>",
    "eos_token": "<|im_end|>",
    "im_start_token": "<|im_start|>",
    "image_token": "<im_patch>",
    "image_start_token": "<im_start>",
    "image_end_token": "<im_end>",
    "crop_start_token": "<patch_start>",
    "crop_end_token": "<patch_end>",
    "row_end_token": "<patch_newline>",
}
_TEMPLATE = """{{- bos_token -}}{%- for message in messages -%}{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}{{- message.content -}}{%- else -%}{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{- '<im_patch>' -}}{%- else -%}{{- part.text -}}{%- endif -%}
{%- endfor -%}{%- endif -%}{{- '<|im_end|>\\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
_TEXT = {
    "head_dim": 16,
    "num_sliding_attention_heads": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 18,
    "mlp_layer_types": ["dense", "sparse"],
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "share_expert_dim": 40,
}
_VISION = {
    "hidden_size": 32,
    "mlp_ratio": 1.5,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 112,
    "max_position_embeddings": 64,
}


def make(path: Path) -> Path:
    """A directory with weights."""
    from transformers import Step3p7Config, Step3p7ForConditionalGeneration, Step3p7ImageProcessor, Step3p7Processor

    tokenizer = byte_tokenizer(path, _TOKENS)
    image = Step3p7ImageProcessor(size={"height": 112, "width": 112}, patch_size=56)
    Step3p7Processor(image, tokenizer, chat_template=_TEMPLATE).save_pretrained(path)
    config = Step3p7Config(
        text_config=text_config(tokenizer, **_TEXT), vision_config=_VISION, image_token_id=tokenizer.image_token_id
    )
    randomize(Step3p7ForConditionalGeneration(config)).save_pretrained(path)
    return path


FAMILY = Family(
    make,
    wrap=("model.vision_model.layers.{*}", "model.language_model.layers.{*}"),
    kinds=("image",),
    flags={"micro_batch_size": 2},
)
