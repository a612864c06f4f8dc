"""Qwen3 with experts (text)."""

from __future__ import annotations

from mindspeed_mm.models.common.families import TEXT, Family

FAMILY = Family("transformers:Qwen3MoeForCausalLM", traits=TEXT)
