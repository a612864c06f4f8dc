"""Megatron-core form of Qwen2.5-VL's tower, its smallest input, and the position ids of rows with media."""

from __future__ import annotations

from typing import Any

import torch

from mindspeed_mm.models.megatron.family import Towers
from mindspeed_mm.models.megatron.vision.qwen2_5_vl import PatchLayout, Qwen2_5_VLImageEncoder


def smallest_image(vision_config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one merged patch of zeros: ([merge², channels * frames * patch²] float32, [1, 3] int64)."""
    side = vision_config.spatial_merge_size
    width = vision_config.in_channels * vision_config.temporal_patch_size * vision_config.patch_size**2
    return torch.zeros(side * side, width), torch.tensor([[1, side, side]])


def positions(meta_model: Any, batch: dict[str, Any]) -> torch.Tensor | None:
    """Return time, height and width of every token [3, batch, sequence], as the transformers model computes them."""
    no_embeddings = no_cache = None  # positional: releases of transformers name the cache differently
    return meta_model.model.compute_3d_position_ids(
        batch["input_ids"],
        batch.get("image_grid_thw"),
        batch.get("video_grid_thw"),
        no_embeddings,
        batch.get("attention_mask"),
        no_cache,
        second_per_grid_ts=batch.get("second_per_grid_ts"),
        mm_token_type_ids=batch.get("mm_token_type_ids"),
    )


TOWERS = Towers(Qwen2_5_VLImageEncoder, PatchLayout.of_grids, smallest_image, positions)
