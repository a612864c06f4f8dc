"""LLaVA-NeXT (1.6): LLaVA with images cut into tiles, and a learned newline embedding after each row of features."""

from __future__ import annotations

from mindspeed_mm.models.common.families import Family

FAMILY = Family(
    "transformers:LlavaNextForConditionalGeneration",
    traits=".traits:TRAITS",
    adapter=".data:ADAPTER",
    package=__name__,
)
