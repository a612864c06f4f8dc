"""Parts and tower of Kimi K2.5, and the tower's smallest input."""

from __future__ import annotations

from typing import Any

import torch

from mindspeed_mm.models.common.family import FamilyTraits
from mindspeed_mm.models.common.idle_tower import Tower
from mindspeed_mm.models.common.packed import plain_positions


def _run_one_token(model: Any, device: torch.device) -> torch.Tensor:
    """Run tower and projector on the patches of one token, of zeros → [1, hidden]."""
    vision = model.config.vision_config
    height, width = vision.merge_kernel_size
    pixels = torch.zeros(height * width, 3, vision.patch_size, vision.patch_size, device=device, dtype=model.dtype)
    grid = torch.tensor([[1, height, width]], device=device)
    return torch.cat(list(model.model.get_image_features(pixels, grid, return_dict=True).pooler_output))


TRAITS = FamilyTraits(
    language_model="model.language_model",
    parts={
        "vision_encoder": ("model.vision_tower",),
        "vision_projector": ("model.mm_projector",),
        "text_decoder": ("model.language_model", "lm_head"),
    },
    sub_configs={"vision_encoder": "vision_config", "text_decoder": "text_config"},
    towers=(
        Tower("model.vision_tower", ("image",), ("pixel_values",), _run_one_token, beside=("model.mm_projector",)),
    ),
    packed_positions=plain_positions,
    attention="causal",
)
