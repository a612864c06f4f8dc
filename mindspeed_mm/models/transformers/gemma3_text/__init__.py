"""Gemma 3 (text): windows of attention between whole ones."""

from __future__ import annotations

from transformers import Gemma3ForCausalLM as HFGemma3Text

from mindspeed_mm.models.common.modelzoo import ModelHub
from mindspeed_mm.models.transformers.base_model import adapt_class
from mindspeed_mm.models.transformers.family import TEXT_TRAITS

Gemma3ForCausalLM = adapt_class(HFGemma3Text)
Gemma3ForCausalLM.traits = TEXT_TRAITS  # type: ignore[attr-defined]
ModelHub.register("gemma3_text", Gemma3ForCausalLM)
