"""DeepSeek-VL (the checkpoints in transformers' layout): a SigLIP tower, an aligner and a Llama model."""

from __future__ import annotations

from mindspeed_mm.models.common.families import Family

FAMILY = Family(
    "transformers:DeepseekVLForConditionalGeneration",
    traits=".traits:TRAITS",
    adapter=".data:ADAPTER",
    package=__name__,
)
