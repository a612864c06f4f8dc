"""InternVL (the checkpoints in transformers' layout): tiles and frames through one tower, four patches a token."""

from __future__ import annotations

import dataclasses

from transformers import InternVLForConditionalGeneration as HFInternVL

from mindspeed_mm.models.common.modelzoo import ModelHub
from mindspeed_mm.models.transformers.base_model import adapt_class
from mindspeed_mm.models.transformers.llava import TOWER, TRAITS

InternVLForConditionalGeneration = adapt_class(HFInternVL)
InternVLForConditionalGeneration.traits = dataclasses.replace(  # type: ignore[attr-defined]
    TRAITS, towers=(dataclasses.replace(TOWER, modalities=("image", "video")),)
)
ModelHub.register("internvl", InternVLForConditionalGeneration)
