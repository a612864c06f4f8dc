"""Parts and tower of Mistral 3, and the tower's smallest input."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from mindspeed_mm.models.transformers.llava.traits import TOWER, TRAITS


def _run_two_patches(model: Any, device: torch.device) -> torch.Tensor:
    """Run tower and projector on an image of two merged patches of zeros, their smallest input → [2, hidden]."""
    config = model.config
    side = config.vision_config.patch_size * config.spatial_merge_size
    pixels = torch.zeros(1, config.vision_config.num_channels, side, 2 * side, device=device, dtype=model.dtype)
    sizes = torch.tensor([[side, 2 * side]])
    return torch.cat(list(model.model.get_image_features(pixels, sizes, return_dict=True).pooler_output))


TRAITS = dataclasses.replace(
    TRAITS, towers=(dataclasses.replace(TOWER, run_dummy=_run_two_patches, patches_per_row=lambda config: 1),)
)
