"""Parts and tower of LLaVA-NeXT, and the tower's smallest input."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from mindspeed_mm.models.transformers.llava.traits import TOWER, TRAITS


def run_smallest_tiling(model: Any, device: torch.device) -> torch.Tensor:
    """Run tower, projector and newline embedding on the smallest image, whole and in tiles → [tokens, hidden].

    The image has the shape of the smallest arrangement of tiles, all of which it fills.
    """
    config = model.config
    vision, side = config.vision_config, config.vision_config.image_size
    height, width = min(config.image_grid_pinpoints, key=lambda sides: sides[0] * sides[1])
    tiles = 1 + (height // side) * (width // side)
    pixels = torch.zeros(1, tiles, vision.num_channels, side, side, device=device, dtype=model.dtype)
    sizes = torch.tensor([[height, width]])
    return torch.cat(list(model.model.get_image_features(pixels, sizes, return_dict=True).pooler_output))


TRAITS = dataclasses.replace(
    TRAITS,
    towers=(dataclasses.replace(TOWER, run_dummy=run_smallest_tiling, beside=(*TOWER.beside, "model.image_newline")),),
)
