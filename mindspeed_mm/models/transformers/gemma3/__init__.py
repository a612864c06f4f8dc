"""Gemma 3 with pictures: a SigLIP tower, a pooling projector; the tokens of a picture see all of it."""

from __future__ import annotations

from mindspeed_mm.models.common.families import Family

FAMILY = Family(
    ".model:Gemma3ForConditionalGeneration",
    traits=".model:TRAITS",
    adapter=".data:ADAPTER",
    package=__name__,
)
