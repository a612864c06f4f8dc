"""Gemma 3 with images: a SigLIP tower and a pooling projector; an image's tokens attend to all of the image."""

from __future__ import annotations

from mindspeed_mm.models.common.families import Family

FAMILY = Family(
    ".model:Gemma3ForConditionalGeneration",
    traits=".model:TRAITS",
    adapter=".data:ADAPTER",
    package=__name__,
)
