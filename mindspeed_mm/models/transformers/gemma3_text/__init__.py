"""Gemma 3 (text): layers of sliding and of full attention."""

from __future__ import annotations

from mindspeed_mm.models.common.families import TEXT, Family

FAMILY = Family("transformers:Gemma3ForCausalLM", traits=TEXT)
