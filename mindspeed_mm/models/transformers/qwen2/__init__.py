"""Qwen2 and Qwen2.5 (text): the transformers class with the mixins."""

from __future__ import annotations

from transformers import Qwen2ForCausalLM as HFQwen2

from mindspeed_mm.models.common.modelzoo import ModelHub
from mindspeed_mm.models.transformers.base_model import adapt_class
from mindspeed_mm.models.transformers.family import TEXT_TRAITS

Qwen2ForCausalLM = adapt_class(HFQwen2)
Qwen2ForCausalLM.traits = TEXT_TRAITS  # type: ignore[attr-defined]
ModelHub.register("qwen2", Qwen2ForCausalLM)
