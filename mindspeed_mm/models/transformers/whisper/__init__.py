"""Whisper."""

from __future__ import annotations

from mindspeed_mm.models.common.families import Family

FAMILY = Family(
    ".model:WhisperForConditionalGeneration",
    traits=".model:TRAITS",
    adapter=".data:ADAPTER",
    package=__name__,
)
