"""Parts and tower of Qwen3-ASR, and the tower's smallest input."""

from __future__ import annotations

from typing import Any

import torch

from mindspeed_mm.models.common.family import FamilyTraits
from mindspeed_mm.models.common.idle_tower import Tower
from mindspeed_mm.models.common.packed import plain_positions


def run_smallest_chunk(model: Any, device: torch.device) -> torch.Tensor:
    """Run tower and projector on one chunk of zeros → [positions, hidden]."""
    audio, first = model.config.audio_config, model.model.audio_tower.conv2d1.weight
    features = torch.zeros(1, audio.num_mel_bins, 2 * audio.n_window, device=device, dtype=first.dtype)
    mask = torch.ones(1, 2 * audio.n_window, dtype=torch.long, device=device)
    return model.model.get_audio_features(features, mask, return_dict=True).pooler_output


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
            run_smallest_chunk,
            beside=("model.multi_modal_projector",),
        ),
    ),
    packed_positions=plain_positions,
    placeholders=("audio",),
    attention="causal",
)
