"""Qwen3-VL with experts reads rows as Qwen3-VL does."""

from __future__ import annotations

from mindspeed_mm.models.transformers.qwen3_vl.data import ADAPTER

__all__ = ["ADAPTER"]
