"""Parts and towers of DeepSeek-VL with a second tower, and the towers' smallest input."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from mindspeed_mm.models.transformers.deepseek_vl.traits import TRAITS


def _run_one_picture(model: Any, device: torch.device) -> torch.Tensor:
    """Run both towers and the aligner on one image of zeros, in their only input sizes → [tokens, hidden]."""
    config = model.config
    low, high = (
        torch.zeros(1, part.num_channels, part.image_size, part.image_size, device=device, dtype=model.dtype)
        for part in (config.vision_config, config.high_res_vision_config)
    )
    return torch.cat(list(model.model.get_image_features(low, high, return_dict=True).pooler_output))


_HIGH = (
    "model.high_res_vision_model",
    "model.high_res_vision_neck",
    "model.high_res_vision_proj",
)
TRAITS = dataclasses.replace(
    TRAITS,
    parts={**TRAITS.parts, "vision_encoder": ("model.vision_model", *_HIGH)},
    towers=(
        dataclasses.replace(
            TRAITS.towers[0],
            run_dummy=_run_one_picture,
            beside=("model.aligner", *_HIGH, "model.high_res_vision_alpha"),
            has_one_size=True,
        ),
    ),
)
