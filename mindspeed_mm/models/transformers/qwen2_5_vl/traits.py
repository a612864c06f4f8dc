"""Parts and tower of Qwen2.5-VL, and the tower's smallest input."""

from __future__ import annotations

from typing import Any

import torch

from mindspeed_mm.models.common.family import FamilyTraits
from mindspeed_mm.models.common.idle_tower import Tower
from mindspeed_mm.models.transformers.qwen2_5_vl.batches import one_tower_pass, packed_positions
from mindspeed_mm.parallel.media import MediaSplit


def run_one_patch(model: Any, device: torch.device) -> torch.Tensor:
    """Run the vision tower on one merged patch of zeros → [1, hidden]."""
    vision = model.config.vision_config
    side = vision.spatial_merge_size
    patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = torch.zeros(side * side, patch, device=device, dtype=model.model.visual.dtype)
    grid = torch.tensor([[1, side, side]], device=device)
    return model.model.visual(pixels, grid_thw=grid, return_dict=True).pooler_output


#: a grid [time, height, width] for each image and video, of whose patches squares are merged into one token
GRID_SPLIT = MediaSplit(
    outputs=("pooler_output",),
    grids={"pixel_values": "image_grid_thw", "pixel_values_videos": "video_grid_thw"},
    rows_per_token=lambda config: config.vision_config.spatial_merge_size**2,
)
GRID_TOWER = Tower(
    "model.visual",
    ("image", "video"),
    ("pixel_values", "pixel_values_videos"),
    run_one_patch,
    split=GRID_SPLIT,
)
TRAITS = FamilyTraits(
    language_model="model.language_model",
    parts={
        "vision_encoder": ("model.visual",),
        "vision_projector": ("model.visual.merger",),
        "text_decoder": ("model.language_model", "lm_head"),
    },
    sub_configs={"vision_encoder": "vision_config", "text_decoder": "text_config"},
    towers=(GRID_TOWER,),
    packed_positions=packed_positions,
    attention="causal",
    prepare_batch=one_tower_pass,
)
