"""GLM-4.6V with the dense language model of GLM-4.1V, whose parts it has."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_mm.models.transformers.glm4v import FAMILY as GLM4V

FAMILY = replace(GLM4V, model="transformers:Glm46VForConditionalGeneration")
