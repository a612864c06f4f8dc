"""Kimi K2.5 and K2.6: DeepSeek-V3's language model with images."""

from __future__ import annotations

from mindspeed_mm.models.common.families import Family

FAMILY = Family(
    "transformers:Kimi_K25ForConditionalGeneration",
    traits=".traits:TRAITS",
    adapter=".data:ADAPTER",
    package=__name__,
)
