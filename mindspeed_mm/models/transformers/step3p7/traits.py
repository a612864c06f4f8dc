"""Parts of Step-3.7, and its tower, which runs for whole images and once more for crops."""

from __future__ import annotations

from typing import Any

import torch

from mindspeed_mm.models.common.family import FamilyTraits
from mindspeed_mm.models.common.idle_tower import Tower
from mindspeed_mm.models.common.packed import plain_positions


def _run_one_patch(model: Any, device: torch.device) -> torch.Tensor:
    """Run tower and projector on one patch of zeros → [1, 1, hidden]."""
    vision = model.config.vision_config
    pixels = torch.zeros(1, vision.num_channels, vision.patch_size, vision.patch_size, device=device, dtype=model.dtype)
    return model.model.multi_modal_projector(model.model.vision_model(pixels).last_hidden_state)


def _tower(pixels: str) -> Tower:
    """One of the two passes: ranks whose images have no crops run the second one, too."""
    return Tower("model.vision_model", ("image",), (pixels,), _run_one_patch, beside=("model.multi_modal_projector",))


TRAITS = FamilyTraits(
    language_model="model.language_model",
    parts={
        "vision_encoder": ("model.vision_model",),
        "vision_projector": ("model.multi_modal_projector",),
        "text_decoder": ("model.language_model", "lm_head"),
    },
    sub_configs={"vision_encoder": "vision_config", "text_decoder": "text_config"},
    towers=(_tower("pixel_values"), _tower("pixel_values_local")),
    packed_positions=plain_positions,
    placeholders=("image",),
)
