"""Traits of GPT-OSS, and the masks of its full and sliding layers for packed rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from mindspeed_mm.models.common.family import TEXT_TRAITS


def _packed_masks(model: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the masks of full and sliding layers from restarting positions, which the model itself ignores.

    Args:
        model: the transformers model.
        batch: position_ids [batch, sequence] int64.

    Returns:
        layer type → mask for the model's attention; for eager attention [batch, 1, sequence, sequence] float32.
    """
    position_ids = batch["position_ids"]
    embeddings = torch.empty(*position_ids.shape, 0, device=position_ids.device)
    no_mask = no_cache = None  # positional: releases of transformers name the cache differently
    given = (model.config, embeddings, no_mask, no_cache, position_ids)
    return {
        "full_attention": create_causal_mask(*given),
        "sliding_attention": create_sliding_window_causal_mask(*given),
    }


TRAITS = dataclasses.replace(TEXT_TRAITS, packed_masks=_packed_masks)
