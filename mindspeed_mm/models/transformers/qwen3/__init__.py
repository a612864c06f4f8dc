"""Qwen3 (text): the transformers class with the mixins."""

from __future__ import annotations

from transformers import Qwen3ForCausalLM as HFQwen3

from mindspeed_mm.models.common.modelzoo import ModelHub
from mindspeed_mm.models.transformers.base_model import adapt_class
from mindspeed_mm.models.transformers.family import TEXT_TRAITS

Qwen3ForCausalLM = adapt_class(HFQwen3)
Qwen3ForCausalLM.traits = TEXT_TRAITS  # type: ignore[attr-defined]
ModelHub.register("qwen3", Qwen3ForCausalLM)
