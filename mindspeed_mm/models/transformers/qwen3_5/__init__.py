"""Qwen3.5 and Qwen3.6: images and videos as in Qwen3-VL, three of four layers with linear attention."""

from __future__ import annotations

from mindspeed_mm.models.common.families import Family

FAMILY = Family(
    ".model:Qwen3_5ForConditionalGeneration",
    traits=".model:TRAITS",
    adapter="mindspeed_mm.models.transformers.qwen3_vl.data:ADAPTER",
    package=__name__,
)
