"""DeepSeek-V3 and R1: the transformers class with the mixins."""

from __future__ import annotations

from transformers import DeepseekV3ForCausalLM as HFDeepseekV3

from mindspeed_mm.models.common.modelzoo import ModelHub
from mindspeed_mm.models.transformers.base_model import adapt_class
from mindspeed_mm.models.transformers.family import TEXT_TRAITS

DeepseekV3ForCausalLM = adapt_class(HFDeepseekV3)
DeepseekV3ForCausalLM.traits = TEXT_TRAITS  # type: ignore[attr-defined]
ModelHub.register("deepseek_v3", DeepseekV3ForCausalLM)
