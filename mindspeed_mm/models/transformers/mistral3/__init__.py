"""Mistral Small 3.1 and Magistral: a Pixtral tower for images of any shape, a merging projector, a Mistral model."""

from __future__ import annotations

from mindspeed_mm.models.common.families import Family

FAMILY = Family(
    "transformers:Mistral3ForConditionalGeneration",
    traits=".traits:TRAITS",
    adapter=".data:ADAPTER",
    package=__name__,
)
