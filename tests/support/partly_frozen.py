"""A plugin: Qwen3-MoE of which model.json's key `frozen_parameters`, a pattern of names, says what is not trained."""

from __future__ import annotations

import re
from typing import Any

import transformers

from mindspeed_mm.models.common.family import TEXT_TRAITS
from mindspeed_mm.models.common.modelzoo import ModelHub
from mindspeed_mm.models.transformers.base_model import FSDP2Mixin, WeightInitMixin


class Qwen3MoeForCausalLM(transformers.Qwen3MoeForCausalLM, FSDP2Mixin, WeightInitMixin):
    """Qwen3-MoE under its own name."""

    traits = TEXT_TRAITS

    def freeze(self, config: Any) -> None:
        """Freeze the parameters whose names the pattern is found in."""
        for name, parameter in self.named_parameters():
            if re.search(config["frozen_parameters"], name):
                parameter.requires_grad_(False)


ModelHub.register("partly_frozen", Qwen3MoeForCausalLM)
