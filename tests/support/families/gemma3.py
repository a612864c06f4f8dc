"""Gemma 3 with pictures, whose tokens see each other; a window cuts through them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.families import Family, randomize
from tests.support.families.gemma3_text import TEMPLATE, TOKENS, windows
from tests.support.tiny_vision import VISION, byte_tokenizer

_TOKENS = {
    **TOKENS,
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}


def make(path: Path) -> Path:
    """A directory with weights."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3ImageProcessor, Gemma3Processor

    tokenizer = byte_tokenizer(path, _TOKENS, adds_bos=True)
    image = Gemma3ImageProcessor(size={"height": 64, "width": 64})
    Gemma3Processor(image, tokenizer, chat_template=TEMPLATE, image_seq_length=16).save_pretrained(path)
    config = Gemma3Config(
        text_config=windows(tokenizer),
        vision_config={**VISION, "image_size": 64, "vision_use_head": False},
        mm_tokens_per_image=16,
        boi_token_index=tokenizer.boi_token_id,
        eoi_token_index=tokenizer.eoi_token_id,
        image_token_index=tokenizer.image_token_id,
    )
    randomize(Gemma3ForConditionalGeneration(config)).save_pretrained(path)
    return path


def published_4b() -> Any:
    """The configuration of Gemma 3 4B."""
    from transformers import Gemma3Config

    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "num_attention_heads": 8}
    text |= {"num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208}
    vision = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
    vision |= {"image_size": 896, "patch_size": 14, "vision_use_head": False}
    return Gemma3Config(text_config=text, vision_config=vision)


FAMILY = Family(
    make,
    wrap=("model.vision_tower.encoder.layers.{*}", "model.language_model.layers.{*}"),
    kinds=("image",),
    published={"4B": (published_4b, 4_300_079_472)},
)
