"""Llama 3: the transformers class with the mixins."""

from __future__ import annotations

from transformers import LlamaForCausalLM as HFLlama

from mindspeed_mm.models.common.modelzoo import ModelHub
from mindspeed_mm.models.transformers.base_model import adapt_class
from mindspeed_mm.models.transformers.family import TEXT_TRAITS

LlamaForCausalLM = adapt_class(HFLlama)
LlamaForCausalLM.traits = TEXT_TRAITS  # type: ignore[attr-defined]
ModelHub.register("llama", LlamaForCausalLM)
