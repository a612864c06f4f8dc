"""Kimi K2.5: a tower for images of any size, and DeepSeek-V3's language model; in the hub's layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.families import Family, padded_vocabulary, randomize
from tests.support.tiny_vision import byte_tokenizer

_TOKENS = {
    "bos_token": "[BOS]",
    "eos_token": "<|im_end|>",
    "image_token": "<|media_pad|>",
    "video_token": "<|kimi_k25_video_placeholder|>",
    "user_token": "<|im_user|>",
    "assistant_token": "<|im_assistant|>",
    "middle_token": "<|im_middle|>",
    "media_begin_token": "<|media_begin|>",
    "media_content_token": "<|media_content|>",
    "media_end_token": "<|media_end|>",
}
_TEMPLATE = """{%- for message in messages -%}{{- '<|im_' + message.role + '|>' + message.role + '<|im_middle|>' -}}
{%- if message.content is string -%}{{- message.content -}}{%- else -%}{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{- '<|media_begin|>image<|media_content|><|media_pad|><|media_end|>\\n' -}}
{%- else -%}{{- part.text -}}{%- endif -%}{%- endfor -%}{%- endif -%}{{- '<|im_end|>' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_assistant|>assistant<|im_middle|>' -}}{%- endif -%}"""
_TEXT = {
    "model_type": "deepseek_v3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 28,
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "max_position_embeddings": 2048,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "pos_emb_height": 8,
    "pos_emb_width": 8,
}


def make(path: Path) -> Path:
    """A directory with weights."""
    from transformers import (
        Kimi_K25Config,
        Kimi_K25ForConditionalGeneration,
        Kimi_K25ImageProcessor,
        Kimi_K25Processor,
        Kimi_K25VideoProcessor,
    )

    tokenizer = byte_tokenizer(path, _TOKENS)
    image, video = Kimi_K25ImageProcessor(max_patches=24), Kimi_K25VideoProcessor(max_patches=24)
    Kimi_K25Processor(image, tokenizer, video, chat_template=_TEMPLATE).save_pretrained(path)
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = Kimi_K25Config(
        text_config={**_TEXT, **ids, "vocab_size": padded_vocabulary(tokenizer)},
        vision_config=_VISION,
        projection_hidden_size=_VISION["hidden_size"],
        image_token_id=tokenizer.image_token_id,
        video_token_id=tokenizer.video_token_id,
        tie_word_embeddings=False,
    )
    randomize(Kimi_K25ForConditionalGeneration(config)).save_pretrained(path)
    return path


def published_1t() -> Any:
    """The configuration of Kimi K2.5."""
    from transformers import Kimi_K25Config

    text = {"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61}
    text |= {"num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 163840, "n_routed_experts": 384}
    text |= {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 2048}
    return Kimi_K25Config(text_config=text, tie_word_embeddings=False)


FAMILY = Family(
    make,
    wrap=(
        "model.vision_tower",
        "model.vision_tower.layers.{*}",
        "model.mm_projector",
        "model.language_model",
        "model.language_model.embed_tokens",
        "model.language_model.layers.{*}",
        "model.language_model.layers.{*}.mlp.experts",
        "lm_head",
    ),
    kinds=("image",),
    # the language model is that of Kimi K2, of 1,026,408,232,448 parameters; the rest is the tower and the projector
    published={"1T": (published_1t, 1_026_408_232_448 + 471_143_920)},
)
