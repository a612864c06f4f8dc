"""Llama 4: images cut into tiles, a layer with attention in chunks before one without positions, experts in one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.families import Family, randomize
from tests.support.tiny_vision import byte_tokenizer, text_config

_TOKENS = {
    "bos_token": "<|begin_of_text|>",
    "eos_token": "<|eot|>",
    "header_start_token": "<|header_start|>",
    "header_end_token": "<|header_end|>",
    "image_token": "<|image|>",
    "image_start_token": "<|image_start|>",
    "image_end_token": "<|image_end|>",
    "patch_token": "<|patch|>",
    "tile_x_token": "<|tile_x_separator|>",
    "tile_y_token": "<|tile_y_separator|>",
}
_TEXT = {
    "head_dim": 16,
    "intermediate_size": 24,
    "intermediate_size_mlp": 96,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "moe_layers": [1],
    "no_rope_layers": [1, 0],
    "attention_chunk_size": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 128,  # four patches, which become a token
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
    "projector_input_dim": 24,
    "projector_output_dim": 24,
    "vision_output_dim": 24,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}


def make(path: Path) -> Path:
    """A directory with weights."""
    from transformers import Llama4Config, Llama4ForConditionalGeneration, Llama4ImageProcessor, Llama4Processor

    tokenizer = byte_tokenizer(path, _TOKENS)
    image = Llama4ImageProcessor(size={"height": 56, "width": 56}, max_patches=4)
    Llama4Processor(image, tokenizer).save_pretrained(path)
    config = Llama4Config(
        text_config=text_config(tokenizer, **_TEXT),
        vision_config=_VISION,
        boi_token_index=tokenizer.image_start_token_id,
        eoi_token_index=tokenizer.image_end_token_id,
        image_token_index=tokenizer.patch_token_id,
    )
    randomize(Llama4ForConditionalGeneration(config)).save_pretrained(path)
    return path


def outputs(model: Any, inputs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Logits [n, vocabulary] and the tokens that follow [n], by the parts of the model: the forward method of
    transformers 5.24 ends in an error when it has the logits."""
    ids, pixels = inputs["input_ids"], inputs.get("pixel_values")
    embeddings = model.get_input_embeddings()(ids)
    if pixels is not None:
        tiles = model.get_image_features(pixels.to(model.dtype), return_dict=True).last_hidden_state
        belongs = (ids == model.config.image_token_index).unsqueeze(-1)
        embeddings = embeddings.masked_scatter(belongs, model.multi_modal_projector(tiles.flatten(0, 1)))
    logits = model.language_model(inputs_embeds=embeddings, attention_mask=inputs["attention_mask"]).logits
    return logits[0, :-1], inputs["labels"][0, 1:]


def scout() -> Any:
    """The configuration of Llama 4 Scout."""
    from transformers import Llama4Config

    vision = {"hidden_size": 1408, "intermediate_size": 5632, "num_hidden_layers": 34, "num_attention_heads": 16}
    return Llama4Config(text_config={}, vision_config={**vision, "image_size": 336, "vision_output_dim": 4096})


FAMILY = Family(
    make,
    wrap=("vision_model.model.layers.{*}", "language_model.model.layers.{*}"),
    kinds=("image",),
    flags={"micro_batch_size": 2},
    outputs=outputs,
    published={"Scout": (scout, 108_641_793_536)},
)
