"""LLaVA-OneVision: pictures in tiles, videos frame by frame at a quarter of the tokens, through one SigLIP tower."""

from __future__ import annotations

from mindspeed_mm.models.common.families import Family

FAMILY = Family(
    "transformers:LlavaOnevisionForConditionalGeneration",
    traits=".traits:TRAITS",
    adapter=".data:ADAPTER",
    package=__name__,
)
