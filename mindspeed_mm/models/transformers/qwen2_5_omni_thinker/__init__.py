"""The thinker of Qwen2.5-Omni in a directory of its own, as transformers saves it."""

from __future__ import annotations

from mindspeed_mm.models.transformers.qwen2_5_omni import FAMILY

__all__ = ["FAMILY"]
