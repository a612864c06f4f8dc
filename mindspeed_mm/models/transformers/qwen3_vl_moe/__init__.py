"""Qwen3-VL with experts: parts, tower and batches are named as Qwen3-VL's."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_mm.models.transformers.qwen3_vl import FAMILY as QWEN3_VL

FAMILY = replace(QWEN3_VL, model="transformers:Qwen3VLMoeForConditionalGeneration")
