"""DeepSeek-VL (the checkpoints in transformers' layout): a SigLIP tower, an aligner and a Llama model."""

from __future__ import annotations

import dataclasses

from transformers import DeepseekVLForConditionalGeneration as HFDeepseekVL

from mindspeed_mm.models.common.modelzoo import ModelHub
from mindspeed_mm.models.transformers.base_model import adapt_class
from mindspeed_mm.models.transformers.llava import TOWER
from mindspeed_mm.models.transformers.llava import TRAITS as LLAVA_TRAITS

TRAITS = dataclasses.replace(
    LLAVA_TRAITS,
    parts={
        "vision_encoder": ("model.vision_model",),
        "vision_projector": ("model.aligner",),
        "text_decoder": ("model.language_model", "lm_head"),
    },
    towers=(dataclasses.replace(TOWER, path="model.vision_model", beside=("model.aligner",)),),
)

DeepseekVLForConditionalGeneration = adapt_class(HFDeepseekVL)
DeepseekVLForConditionalGeneration.traits = TRAITS  # type: ignore[attr-defined]
ModelHub.register("deepseek_vl", DeepseekVLForConditionalGeneration)
