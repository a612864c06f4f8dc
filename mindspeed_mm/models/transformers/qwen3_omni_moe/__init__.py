"""Qwen3-Omni's thinker: the transformers class with the mixins, its parts and its towers' smallest inputs."""

from __future__ import annotations

from dataclasses import replace

from transformers import Qwen3OmniMoeThinkerForConditionalGeneration as HFThinker

from mindspeed_mm.models.common.idle_tower import Tower
from mindspeed_mm.models.common.modelzoo import ModelHub
from mindspeed_mm.models.transformers.base_model import adapt_class
from mindspeed_mm.models.transformers.qwen2_5_omni import AUDIO_TOWER
from mindspeed_mm.models.transformers.qwen2_5_omni import TRAITS as OMNI
from mindspeed_mm.models.transformers.qwen3_vl import run_one_deepstack_patch

TRAITS = replace(
    OMNI,
    parts={**OMNI.parts, "vision_projector": ("model.visual.merger", "model.visual.merger_list")},
    towers=(
        AUDIO_TOWER,
        Tower("model.visual", ("image", "video"), ("pixel_values", "pixel_values_videos"), run_one_deepstack_patch),
    ),
)

Qwen3OmniMoeThinker = adapt_class(HFThinker)
Qwen3OmniMoeThinker.traits = TRAITS  # type: ignore[attr-defined]
ModelHub.register("qwen3_omni_moe", Qwen3OmniMoeThinker)
