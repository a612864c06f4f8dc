"""DeepSeek-VL with a SAM tower for high resolution beside the SigLIP one."""

from __future__ import annotations

from pathlib import Path

from tests.support.families import Family, randomize
from tests.support.families.deepseek_vl import TEMPLATE, TOKENS, siglip
from tests.support.tiny_vision import VISION, byte_tokenizer, text_config


def make(path: Path) -> Path:
    """A directory with weights."""
    from transformers import (
        DeepseekVLHybridConfig,
        DeepseekVLHybridForConditionalGeneration,
        DeepseekVLHybridImageProcessor,
        DeepseekVLHybridProcessor,
    )

    tokenizer = byte_tokenizer(path, TOKENS, adds_bos=True)
    image = DeepseekVLHybridImageProcessor(size={"height": 32, "width": 32}, high_res_size={"height": 64, "width": 64})
    DeepseekVLHybridProcessor(image, tokenizer, chat_template=TEMPLATE, num_image_tokens=16).save_pretrained(path)
    sam = {**VISION, "image_size": 64, "output_channels": 12, "mlp_dim": 48, "window_size": 3}
    config = DeepseekVLHybridConfig(
        text_config={"model_type": "llama", **text_config(tokenizer)},
        vision_config=siglip(),
        high_res_vision_config={"model_type": "sam_vision_model", **sam, "global_attn_indexes": [1]},
        image_token_id=tokenizer.image_token_id,
        tie_word_embeddings=False,
    )
    randomize(DeepseekVLHybridForConditionalGeneration(config)).save_pretrained(path)
    return path


FAMILY = Family(
    make,
    wrap=(
        "model.vision_model.encoder.layers.{*}",
        "model.high_res_vision_model.vision_encoder.layers.{*}",
        "model.language_model.layers.{*}",
    ),
    kinds=("image",),
)
