"""Qwen3 (text) out of Megatron-core's modules."""

from __future__ import annotations

from mindspeed_mm.models.common.megatron_family import MegatronFamily

FAMILY = MegatronFamily()
