"""Gemma 4: images, videos and sounds; capped logits, layers that share keys and values, experts in one size."""

from __future__ import annotations

from mindspeed_mm.models.common.families import Family

FAMILY = Family(
    ".model:Gemma4ForConditionalGeneration",
    traits=".traits:TRAITS",
    adapter=".data:ADAPTER",
    package=__name__,
)
