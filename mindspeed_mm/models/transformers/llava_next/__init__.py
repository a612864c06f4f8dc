"""LLaVA-NeXT (1.6): LLaVA whose pictures are cut into tiles, with a learnt sign at the end of each row of features."""

from __future__ import annotations

from mindspeed_mm.models.common.families import Family

FAMILY = Family(
    "transformers:LlavaNextForConditionalGeneration",
    traits=".traits:TRAITS",
    adapter=".data:ADAPTER",
    package=__name__,
)
