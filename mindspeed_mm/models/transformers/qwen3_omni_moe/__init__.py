"""Qwen3-Omni's thinker."""

from __future__ import annotations

from mindspeed_mm.models.common.families import Family
from mindspeed_mm.models.transformers.qwen2_5_omni import check_release

FAMILY = Family(
    "transformers:Qwen3OmniMoeThinkerForConditionalGeneration",
    traits=".traits:TRAITS",
    adapter=".data:ADAPTER",
    package=__name__,
    check_release=check_release,
)
