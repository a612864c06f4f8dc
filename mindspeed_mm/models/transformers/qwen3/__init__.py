"""Qwen3 (text): the transformers class with the mixins."""

from __future__ import annotations

from transformers import Qwen3ForCausalLM as HFQwen3

from mindspeed_mm.models.common.modelzoo import ModelHub
from mindspeed_mm.models.common.packed import plain_positions
from mindspeed_mm.models.transformers.base_model import adapt_class
from mindspeed_mm.models.transformers.family import FamilyTraits

Qwen3ForCausalLM = adapt_class(HFQwen3)
Qwen3ForCausalLM.traits = FamilyTraits(  # type: ignore[attr-defined]
    language_model="model",
    parts={"text_decoder": ("",)},
    sub_configs={"text_decoder": ""},
    packed_positions=plain_positions,
)
ModelHub.register("qwen3", Qwen3ForCausalLM)
