"""Qwen3 (text) out of Megatron-core's modules: norms of queries and keys, no biases."""

from __future__ import annotations

from mindspeed_mm.configs.family_structure import FamilyStructure
from mindspeed_mm.models.megatron.family import MegatronFamily

MEGATRON = MegatronFamily(FamilyStructure(qk_norm=True))
