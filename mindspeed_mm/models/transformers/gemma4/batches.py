"""Attention masks of Gemma 4 for packed rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.masking_utils import (
    and_masks,
    blockwise_overlay,
    create_causal_mask,
    packed_sequence_mask_function,
    sliding_window_overlay,
)
from transformers.models.gemma4.modeling_gemma4 import get_block_sequence_ids_for_mask


def gemma4_packed_masks(model: Any, batch: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the masks of layers with full and with sliding attention, in which samples don't attend to each other.

    In sliding layers of the larger sizes, an image's tokens see those behind them, too. transformers' own mask for
    these reads the numbers of images at places in the sample instead of the row.

    Args:
        model: the transformers model.
        batch: position_ids [batch, sequence] int64, and mm_token_type_ids [batch, sequence] int64 if there are media.

    Returns:
        layer type → mask for the model's attention; for sdpa [batch, 1, sequence, sequence] bool, True: attended to.
        None: every token sees those before it, and the model's own masks keep samples apart.
    """
    text, types = model.config.get_text_config(), batch.get("mm_token_type_ids")
    if text.use_bidirectional_attention != "vision" or types is None:
        return None
    positions = batch["position_ids"]
    embeddings = torch.empty(*positions.shape, 0, device=positions.device)
    # without positions, which would move the functions below to places in the sample; causality and window are the same
    given = (text, embeddings, None, None, None)  # positional: releases of transformers name the cache differently
    apart = packed_sequence_mask_function((positions == 0).cumsum(-1))
    images = blockwise_overlay(get_block_sequence_ids_for_mask(types, positions.device))
    window = and_masks(sliding_window_overlay(text.sliding_window), apart)
    return {
        "full_attention": create_causal_mask(*given, and_mask_function=apart),
        "sliding_attention": create_causal_mask(*given, or_mask_function=images, and_mask_function=window),
    }
