"""Parts and tower of LLaVA 1.5, and the tower's smallest input."""

from __future__ import annotations

from typing import Any

import torch

from mindspeed_mm.models.common.family import FamilyTraits
from mindspeed_mm.models.common.idle_tower import Tower
from mindspeed_mm.models.common.packed import plain_positions


def _run_one_picture(model: Any, device: torch.device) -> torch.Tensor:
    """Run tower and projector on one image of zeros → [tokens, hidden].

    The tower takes images of one size only, which is therefore the smallest.
    """
    vision = model.config.vision_config
    size = vision.image_size
    height, width = size if isinstance(size, list | tuple) else (size, size)
    pixels = torch.zeros(1, vision.num_channels, height, width, device=device, dtype=model.dtype)
    return torch.cat(list(model.model.get_image_features(pixels, return_dict=True).pooler_output))


def patches_per_picture(config: Any) -> int:
    """Return the number of patches of an image in the tower's input size."""
    sides = (config.vision_config.image_size, config.vision_config.patch_size)
    size, patch = (side if isinstance(side, list | tuple) else (side, side) for side in sides)
    return (size[0] // patch[0]) * (size[1] // patch[1])


TOWER = Tower(
    "model.vision_tower",
    ("image",),
    ("pixel_values",),
    _run_one_picture,
    beside=("model.multi_modal_projector",),
    patches_per_row=patches_per_picture,
)
TRAITS = FamilyTraits(
    language_model="model.language_model",
    parts={
        "vision_encoder": ("model.vision_tower",),
        "vision_projector": ("model.multi_modal_projector",),
        "text_decoder": ("model.language_model", "lm_head"),
    },
    sub_configs={"vision_encoder": "vision_config", "text_decoder": "text_config"},
    towers=(TOWER,),
    packed_positions=plain_positions,
    placeholders=("image",),
    attention="causal",
)
