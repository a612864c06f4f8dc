"""GLM-4.5V: GLM-4.1V's parts around a mixture of experts."""

from __future__ import annotations

from transformers import Glm4vMoeForConditionalGeneration as HFGlm4vMoe

from mindspeed_mm.models.common.modelzoo import ModelHub
from mindspeed_mm.models.transformers.base_model import adapt_class
from mindspeed_mm.models.transformers.glm4v import TRAITS

Glm4vMoeForConditionalGeneration = adapt_class(HFGlm4vMoe)
Glm4vMoeForConditionalGeneration.traits = TRAITS  # type: ignore[attr-defined]
ModelHub.register("glm4v_moe", Glm4vMoeForConditionalGeneration)
