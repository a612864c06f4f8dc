"""Qwen3 with experts (text): the transformers class with the mixins."""

from __future__ import annotations

from transformers import Qwen3MoeForCausalLM as HFQwen3Moe

from mindspeed_mm.models.common.modelzoo import ModelHub
from mindspeed_mm.models.transformers.base_model import adapt_class
from mindspeed_mm.models.transformers.family import TEXT_TRAITS

Qwen3MoeForCausalLM = adapt_class(HFQwen3Moe)
Qwen3MoeForCausalLM.traits = TEXT_TRAITS  # type: ignore[attr-defined]
ModelHub.register("qwen3_moe", Qwen3MoeForCausalLM)
