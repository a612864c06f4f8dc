"""GLM-4.5V's rows are GLM-4.1V's."""

from __future__ import annotations

from mindspeed_mm.models.transformers.glm4v.data import ADAPTER

__all__ = ["ADAPTER"]
