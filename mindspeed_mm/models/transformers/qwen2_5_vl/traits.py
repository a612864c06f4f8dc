"""Parts and tower of Qwen2.5-VL, and the tower's smallest input."""

from __future__ import annotations

from typing import Any

import torch

from mindspeed_mm.models.common.family import FamilyTraits
from mindspeed_mm.models.common.idle_tower import Tower
from mindspeed_mm.models.transformers.qwen2_5_vl.batches import one_tower_pass, packed_positions
from mindspeed_mm.models.transformers.qwen2_5_vl.grids import GridInputs, smallest_grid, window_inputs
from mindspeed_mm.parallel.media import MediaSplit


def run_one_patch(grid_inputs: GridInputs, model: Any, device: torch.device) -> Any:
    """Return the vision tower's output for one merged patch of zeros.

    Args:
        grid_inputs: the tower's.
        model: the transformers model.
        device: of the model.
    """
    vision = model.config.vision_config
    patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = torch.zeros(vision.spatial_merge_size**2, patch, device=device, dtype=model.model.visual.dtype)
    return model.model.visual(pixels, **smallest_grid(grid_inputs, vision, device), return_dict=True)


def grid_tower(grid_inputs: GridInputs) -> Tower:
    """Return the tower of a family like Qwen2-VL.

    Args:
        grid_inputs: what follows from its grids.
    """
    return Tower(
        "model.visual",
        ("image", "video"),
        ("pixel_values", "pixel_values_videos"),
        lambda model, device: run_one_patch(grid_inputs, model, device).pooler_output,
        split=GRID_SPLIT,
        grids=tuple(GRID_SPLIT.grids.values()),
        grid_inputs=grid_inputs,
    )


#: a grid [time, height, width] for each image and video, of whose patches squares are merged into one token
GRID_SPLIT = MediaSplit(
    outputs=("pooler_output",),
    grids={"pixel_values": "image_grid_thw", "pixel_values_videos": "video_grid_thw"},
    rows_per_token=lambda config: config.vision_config.spatial_merge_size**2,
)
GRID_TOWER = grid_tower(window_inputs)
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
    placeholders=("image", "video"),
)
