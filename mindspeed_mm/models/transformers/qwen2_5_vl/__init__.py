"""Qwen2.5-VL."""

from __future__ import annotations

from mindspeed_mm.models.common.families import Family

FAMILY = Family(
    "transformers:Qwen2_5_VLForConditionalGeneration",
    traits=".traits:TRAITS",
    megatron=".megatron:MEGATRON",
    package=__name__,
)
