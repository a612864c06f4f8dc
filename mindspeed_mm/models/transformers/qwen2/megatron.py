"""Qwen2 and Qwen2.5 (text) built of Megatron-core's modules: biases of queries, keys and values, no norms of them."""

from __future__ import annotations

from mindspeed_mm.configs.family_structure import FamilyStructure
from mindspeed_mm.models.megatron.family import MegatronFamily

MEGATRON = MegatronFamily(FamilyStructure(qkv_bias=True))
