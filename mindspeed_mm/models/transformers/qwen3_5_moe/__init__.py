"""Qwen3.5 and Qwen3.6 with experts."""

from __future__ import annotations

from mindspeed_mm.models.common.families import Family

FAMILY = Family(
    ".model:Qwen3_5MoeForConditionalGeneration",
    traits="mindspeed_mm.models.transformers.qwen3_5.model:TRAITS",
    adapter="mindspeed_mm.models.transformers.qwen3_vl.data:ADAPTER",
    package=__name__,
)
