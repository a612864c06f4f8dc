"""GPT-OSS."""

from __future__ import annotations

from mindspeed_mm.models.common.families import Family

FAMILY = Family(
    "transformers:GptOssForCausalLM",
    traits=".traits:TRAITS",
    package=__name__,
)
