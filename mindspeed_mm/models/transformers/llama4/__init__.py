"""Llama 4: images cut into tiles, layers with attention in chunks and without positions, experts."""

from __future__ import annotations

from mindspeed_mm.models.common.families import Family

FAMILY = Family(
    ".model:Llama4ForConditionalGeneration",
    traits=".model:TRAITS",
    adapter=".data:ADAPTER",
    package=__name__,
)
