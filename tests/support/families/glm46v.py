"""GLM-4.6V with a dense language model: GLM-4.1V's, with seconds of one decimal after the frames of videos."""

from __future__ import annotations

from pathlib import Path

from tests.support.families import Family, randomize
from tests.support.families.glm4v import TEXT, VISION, ids_of, outputs, processor_dir, stops_of
from tests.support.families.glm4v_moe import TEMPLATE


def make(path: Path) -> Path:
    """A directory with weights."""
    from transformers import (
        Glm46VConfig,
        Glm46VForConditionalGeneration,
        Glm46VImageProcessor,
        Glm46VProcessor,
        Glm46VVideoProcessor,
    )

    tokenizer = processor_dir(path)
    size = {"shortest_edge": 28 * 28 * 2, "longest_edge": 28 * 28 * 2 * 8}
    image, video = Glm46VImageProcessor(size=size), Glm46VVideoProcessor(size=size)
    Glm46VProcessor(image, tokenizer, video, chat_template=TEMPLATE).save_pretrained(path)
    text = {**TEXT, "model_type": "glm4v_text", "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    text["eos_token_id"] = stops_of(tokenizer)
    vision = {**VISION, "model_type": "glm4v_vision"}
    config = Glm46VConfig(text_config=text, vision_config=vision, **ids_of(tokenizer))
    randomize(Glm46VForConditionalGeneration(config)).save_pretrained(path)
    return path


FAMILY = Family(
    make,
    wrap=("model.visual.blocks.{*}", "model.language_model.layers.{*}"),
    kinds=("image", "video"),
    outputs=outputs,
    flags={"micro_batch_size": 2},
)
