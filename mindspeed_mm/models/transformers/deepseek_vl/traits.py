"""Parts and tower of DeepSeek-VL."""

from __future__ import annotations

import dataclasses

from mindspeed_mm.models.transformers.llava.traits import TOWER
from mindspeed_mm.models.transformers.llava.traits import TRAITS as LLAVA_TRAITS

TRAITS = dataclasses.replace(
    LLAVA_TRAITS,
    parts={
        "vision_encoder": ("model.vision_model",),
        "vision_projector": ("model.aligner",),
        "text_decoder": ("model.language_model", "lm_head"),
    },
    towers=(dataclasses.replace(TOWER, path="model.vision_model", beside=("model.aligner",)),),
)
