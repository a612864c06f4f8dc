"""Parts and tower of Qwen2-Audio, and the tower's only input length."""

from __future__ import annotations

from typing import Any

import torch

from mindspeed_mm.models.common.family import FamilyTraits
from mindspeed_mm.models.common.idle_tower import Tower
from mindspeed_mm.models.common.packed import plain_positions


def run_window_of_zeros(model: Any, device: torch.device) -> torch.Tensor:
    """Run tower and projector on a window of zeros, their only input length → [1, positions, hidden]."""
    tower = model.model.audio_tower
    features = torch.zeros(1, tower.num_mel_bins, 2 * tower.max_source_positions, device=device)
    return model.model.multi_modal_projector(tower(features).last_hidden_state)


TRAITS = FamilyTraits(
    language_model="model.language_model",
    parts={
        "audio_encoder": ("model.audio_tower", "model.multi_modal_projector"),
        "text_decoder": ("model.language_model", "lm_head"),
    },
    sub_configs={"audio_encoder": "audio_config", "text_decoder": "text_config"},
    towers=(
        Tower(
            "model.audio_tower",
            ("audio",),
            ("input_features",),
            run_window_of_zeros,
            beside=("model.multi_modal_projector",),
            patches_per_row=lambda config: config.audio_config.max_source_positions,
        ),
    ),
    packed_positions=plain_positions,
    attention="causal",
)
