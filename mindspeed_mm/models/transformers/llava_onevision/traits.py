"""Parts of LLaVA-OneVision, and its tower's smallest image and smallest video."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from mindspeed_mm.models.transformers.llava.traits import TOWER, TRAITS
from mindspeed_mm.models.transformers.llava_next.traits import run_smallest_tiling


def run_smallest_video(model: Any, device: torch.device) -> torch.Tensor:
    """Run tower, projector, pooling and newline embedding on a clip of one frame of zeros → [1, tokens, hidden]."""
    vision = model.config.vision_config
    shape = (1, 1, vision.num_channels, vision.image_size, vision.image_size)
    pixels = torch.zeros(shape, device=device, dtype=model.dtype)
    return model.model.get_video_features(pixels, return_dict=True).pooler_output


# The model runs its tower once for images and once for videos, whose features it computes in different ways. So every
# rank runs both passes, each on a dummy if it has no such media.
_BOTH = dataclasses.replace(
    TOWER,
    modalities=("image", "video"),
    beside=(*TOWER.beside, "model.image_newline"),
    projects_patches=True,
)
_TOWERS = (
    dataclasses.replace(_BOTH, run_dummy=run_smallest_tiling),
    dataclasses.replace(_BOTH, input_keys=("pixel_values_videos",), run_dummy=run_smallest_video),
)

TRAITS = dataclasses.replace(TRAITS, towers=_TOWERS, placeholders=("image", "video"))
