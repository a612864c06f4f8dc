"""The thinker by itself reads rows as the whole model does."""

from __future__ import annotations

from mindspeed_mm.models.transformers.qwen3_omni_moe.data import ADAPTER

__all__ = ["ADAPTER"]
