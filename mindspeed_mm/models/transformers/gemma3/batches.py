"""The masks of Gemma 3 in packed rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.masking_utils import create_causal_mask, sliding_window_overlay

from mindspeed_mm.utils.errors import ConfigError


def packed_masks(model: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the masks of both kinds of layers: samples apart, pictures whole, a window of the sample's own tokens.

    transformers' own mask of the layers with a window takes the tokens of a packed row's later samples for those of
    its first one, where it looks for pictures. Here the pictures join behind the window, which is the same as long as
    it has a picture.

    Args:
        model: the transformers model.
        batch: position_ids and token_type_ids [batch, sequence] int64.

    Returns:
        layer type → what the model's attention takes; of sdpa [batch, 1, sequence, sequence] bool, True: is seen.

    Raises:
        ConfigError: a picture has more tokens than the window.
    """
    config, text = model.config, model.config.get_text_config()
    if config.mm_tokens_per_image > text.sliding_window:
        raise ConfigError(
            f"{type(model).__name__} can't train on packed rows: a picture takes {config.mm_tokens_per_image} tokens "
            f"(mm_tokens_per_image), more than sliding_window {text.sliding_window} of its config.json"
        )
    positions = batch["position_ids"]
    embeddings = torch.empty(*positions.shape, 0, device=positions.device)
    no_mask = no_cache = None  # by place: releases of transformers name the cache differently
    given = (text, embeddings, no_mask, no_cache, positions)
    pictures = picture_numbers(batch["token_type_ids"])
    window = sliding_window_overlay(text.sliding_window)
    return {
        "full_attention": create_causal_mask(*given, block_sequence_ids=pictures),
        "sliding_attention": create_causal_mask(*given, block_sequence_ids=pictures, and_mask_function=window),
    }


def picture_numbers(types: torch.Tensor) -> torch.Tensor:
    """Token types [batch, sequence] → number of the picture in its row that a token belongs to, -1: to none."""
    belongs = types == 1
    begins = belongs.clone()
    begins[:, 1:] &= ~belongs[:, :-1]
    return torch.where(belongs, begins.cumsum(1) - 1, -1)
