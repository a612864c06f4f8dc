"""GLM-4.5V: GLM-4.1V's parts with a mixture-of-experts language model."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_mm.models.transformers.glm4v import FAMILY as GLM4V

FAMILY = replace(GLM4V, model="transformers:Glm4vMoeForConditionalGeneration")
