"""ERNIE 4.5 VL: experts for texts, and others for images and videos."""

from __future__ import annotations

from mindspeed_mm.models.common.families import Family

FAMILY = Family(
    ".model:Ernie4_5_VLMoeForConditionalGeneration",
    traits=".model:TRAITS",
    adapter=".data:ADAPTER",
    package=__name__,
)
