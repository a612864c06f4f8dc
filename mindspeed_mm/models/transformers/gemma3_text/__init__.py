"""Gemma 3 (text): windows of attention between whole ones."""

from __future__ import annotations

from mindspeed_mm.models.common.families import TEXT, Family

FAMILY = Family("transformers:Gemma3ForCausalLM", traits=TEXT)
