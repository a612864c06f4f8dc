"""The thinker of Qwen3-Omni in a directory of its own, as transformers saves it."""

from __future__ import annotations

from mindspeed_mm.models.transformers.qwen3_omni_moe import FAMILY

__all__ = ["FAMILY"]
