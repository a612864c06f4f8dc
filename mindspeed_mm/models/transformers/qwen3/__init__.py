"""Qwen3 (text)."""

from __future__ import annotations

from mindspeed_mm.models.common.families import TEXT, Family

FAMILY = Family("transformers:Qwen3ForCausalLM", traits=TEXT, megatron=".megatron:MEGATRON", package=__name__)
