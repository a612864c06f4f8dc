"""DeepSeek-V3 and R1."""

from __future__ import annotations

from mindspeed_mm.models.common.families import TEXT, Family

FAMILY = Family("transformers:DeepseekV3ForCausalLM", traits=TEXT)
