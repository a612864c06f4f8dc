"""Qwen3-VL with experts: the transformers class with the mixins; parts, tower and batches are named as Qwen3-VL's."""

from __future__ import annotations

from transformers import Qwen3VLMoeForConditionalGeneration as HFQwen3VLMoe

from mindspeed_mm.models.common.modelzoo import ModelHub
from mindspeed_mm.models.transformers.base_model import adapt_class
from mindspeed_mm.models.transformers.qwen3_vl import TRAITS

Qwen3VLMoeForConditionalGeneration = adapt_class(HFQwen3VLMoe)
Qwen3VLMoeForConditionalGeneration.traits = TRAITS  # type: ignore[attr-defined]
ModelHub.register("qwen3_vl_moe", Qwen3VLMoeForConditionalGeneration)
