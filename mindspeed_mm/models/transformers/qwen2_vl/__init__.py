"""Qwen2-VL: the transformers class with the mixins; parts, tower and batches are named as Qwen2.5-VL's."""

from __future__ import annotations

from transformers import Qwen2VLForConditionalGeneration as HFQwen2VL

from mindspeed_mm.models.common.modelzoo import ModelHub
from mindspeed_mm.models.transformers.base_model import adapt_class
from mindspeed_mm.models.transformers.qwen2_5_vl import TRAITS

Qwen2VLForConditionalGeneration = adapt_class(HFQwen2VL)
Qwen2VLForConditionalGeneration.traits = TRAITS  # type: ignore[attr-defined]
ModelHub.register("qwen2_vl", Qwen2VLForConditionalGeneration)
