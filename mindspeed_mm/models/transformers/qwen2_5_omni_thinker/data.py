"""The thinker by itself reads rows as the whole model does."""

from __future__ import annotations

from mindspeed_mm.models.transformers.qwen2_5_omni.data import ADAPTER

__all__ = ["ADAPTER"]
