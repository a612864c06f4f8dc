"""Parts and towers of Qwen3-Omni's thinker."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_mm.models.transformers.qwen2_5_omni.traits import AUDIO_TOWER
from mindspeed_mm.models.transformers.qwen2_5_omni.traits import TRAITS as OMNI
from mindspeed_mm.models.transformers.qwen3_vl.traits import DEEPSTACK, DEEPSTACK_TOWER

TRAITS = replace(
    OMNI,
    parts={**OMNI.parts, "vision_projector": ("model.visual.merger", "model.visual.merger_list")},
    tensor=DEEPSTACK,
    towers=(AUDIO_TOWER, DEEPSTACK_TOWER),
)
