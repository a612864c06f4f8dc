"""LLaVA-OneVision: one SigLIP tower for images in tiles, and for video frames with a quarter of the tokens."""

from __future__ import annotations

from mindspeed_mm.models.common.families import Family

FAMILY = Family(
    "transformers:LlavaOnevisionForConditionalGeneration",
    traits=".traits:TRAITS",
    adapter=".data:ADAPTER",
    package=__name__,
)
