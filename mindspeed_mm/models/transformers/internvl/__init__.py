"""InternVL (the checkpoints in transformers' layout): one tower for tiles and frames, one token for four patches."""

from __future__ import annotations

from mindspeed_mm.models.common.families import Family

FAMILY = Family(
    "transformers:InternVLForConditionalGeneration",
    traits=".traits:TRAITS",
    adapter=".data:ADAPTER",
    package=__name__,
)
