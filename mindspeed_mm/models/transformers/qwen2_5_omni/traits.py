"""Parts and towers of Qwen2.5-Omni's thinker, and their smallest inputs."""

from __future__ import annotations

from typing import Any

import torch

from mindspeed_mm.models.common.family import FamilyTraits
from mindspeed_mm.models.common.idle_tower import Tower
from mindspeed_mm.models.transformers.qwen2_5_omni.batches import omni_packed_positions, omni_tower_pass
from mindspeed_mm.models.transformers.qwen2_5_vl.traits import GRID_TOWER

_FRAMES = 8  # become one token in Qwen3-Omni's tower, two in Qwen2.5-Omni's


def run_smallest_sound(model: Any, device: torch.device) -> torch.Tensor:
    """Run the audio tower on 80 ms of zeros → [tokens, hidden]."""
    tower = model.model.audio_tower
    features = torch.zeros(1, tower.num_mel_bins, _FRAMES, device=device)
    mask = torch.ones(1, _FRAMES, dtype=torch.int64, device=device)
    return model.model.get_audio_features(features, mask, return_dict=True).last_hidden_state


AUDIO_TOWER = Tower("model.audio_tower", ("audio",), ("input_features",), run_smallest_sound)

TRAITS = FamilyTraits(
    language_model="model.language_model",
    parts={
        "vision_encoder": ("model.visual",),
        "vision_projector": ("model.visual.merger",),
        "audio_encoder": ("model.audio_tower",),
        "text_decoder": ("model.language_model", "lm_head"),
    },
    sub_configs={
        "vision_encoder": "vision_config",
        "audio_encoder": "audio_config",
        "text_decoder": "text_config",
    },
    towers=(
        AUDIO_TOWER,
        GRID_TOWER,
    ),
    packed_positions=omni_packed_positions,
    attention="causal",
    prepare_batch=omni_tower_pass,
    placeholders=("image", "video", "audio"),
)
