"""Mixtral: the transformers class with the mixins."""

from __future__ import annotations

from transformers import MixtralForCausalLM as HFMixtral

from mindspeed_mm.models.common.modelzoo import ModelHub
from mindspeed_mm.models.transformers.base_model import adapt_class
from mindspeed_mm.models.transformers.family import TEXT_TRAITS

MixtralForCausalLM = adapt_class(HFMixtral)
MixtralForCausalLM.traits = TEXT_TRAITS  # type: ignore[attr-defined]
ModelHub.register("mixtral", MixtralForCausalLM)
