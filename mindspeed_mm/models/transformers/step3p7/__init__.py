"""Step-3.7: images with crops of their parts, layers of sliding and of full attention, experts."""

from __future__ import annotations

from mindspeed_mm.models.common.families import Family

FAMILY = Family(
    "transformers:Step3p7ForConditionalGeneration",
    traits=".traits:TRAITS",
    adapter=".data:ADAPTER",
    package=__name__,
)
