"""DeepSeek-VL Hybrid: DeepSeek-VL with a second tower (SAM's) for images in high resolution."""

from __future__ import annotations

from mindspeed_mm.models.common.families import Family

FAMILY = Family(
    "transformers:DeepseekVLHybridForConditionalGeneration",
    traits=".traits:TRAITS",
    adapter=".data:ADAPTER",
    package=__name__,
)
