"""Parts and towers of Qwen3-Omni's thinker."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_mm.models.common.idle_tower import Tower
from mindspeed_mm.models.transformers.qwen2_5_omni.traits import AUDIO_TOWER
from mindspeed_mm.models.transformers.qwen2_5_omni.traits import TRAITS as OMNI
from mindspeed_mm.models.transformers.qwen3_vl.traits import DEEPSTACK, run_one_deepstack_patch

TRAITS = replace(
    OMNI,
    parts={**OMNI.parts, "vision_projector": ("model.visual.merger", "model.visual.merger_list")},
    towers=(
        AUDIO_TOWER,
        Tower("model.visual", ("image", "video"), ("pixel_values", "pixel_values_videos"), run_one_deepstack_patch),
    ),
    tensor=DEEPSTACK,
)
