"""Llama 3."""

from __future__ import annotations

from mindspeed_mm.models.common.families import TEXT, Family

FAMILY = Family("transformers:LlamaForCausalLM", traits=TEXT)
