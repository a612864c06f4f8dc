"""Attention masks of Gemma 3 for packed rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.masking_utils import create_causal_mask, sliding_window_overlay

from mindspeed_mm.utils.errors import ConfigError


def packed_masks(model: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the masks of layers with full and with sliding attention, in which samples don't attend to each other.

    In sliding layers, transformers' own mask finds the images of a packed row as if it were one sample. Here the mask
    of images is combined with that of the window, which is the same as long as an image fits into the window.

    Args:
        model: the transformers model.
        batch: position_ids and token_type_ids [batch, sequence] int64.

    Returns:
        layer type → mask for the model's attention; for sdpa [batch, 1, sequence, sequence] bool, True: attended to.

    Raises:
        ConfigError: an image has more tokens than the window.
    """
    config, text = model.config, model.config.get_text_config()
    if config.mm_tokens_per_image > text.sliding_window:
        raise ConfigError(
            f"{type(model).__name__} can't train on packed rows: a picture takes {config.mm_tokens_per_image} tokens "
            f"(mm_tokens_per_image), more than sliding_window {text.sliding_window} of its config.json"
        )
    positions = batch["position_ids"]
    embeddings = torch.empty(*positions.shape, 0, device=positions.device)
    no_mask = no_cache = None  # positional: releases of transformers name the cache differently
    given = (text, embeddings, no_mask, no_cache, positions)
    pictures = picture_numbers(batch["token_type_ids"])
    window = sliding_window_overlay(text.sliding_window)
    return {
        "full_attention": create_causal_mask(*given, block_sequence_ids=pictures),
        "sliding_attention": create_causal_mask(*given, block_sequence_ids=pictures, and_mask_function=window),
    }


def picture_numbers(types: torch.Tensor) -> torch.Tensor:
    """Return for token types [batch, sequence] the number of each token's image in its row; -1: not an image token."""
    belongs = types == 1
    begins = belongs.clone()
    begins[:, 1:] &= ~belongs[:, :-1]
    return torch.where(belongs, begins.cumsum(1) - 1, -1)
