"""Qwen2-VL: its parts, tower and batches have the names of Qwen2.5-VL's."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_mm.models.transformers.qwen2_5_vl import FAMILY as QWEN2_5_VL

FAMILY = replace(
    QWEN2_5_VL,
    model="transformers:Qwen2VLForConditionalGeneration",
    traits=".traits:TRAITS",
    megatron=None,
    package=__name__,
)
