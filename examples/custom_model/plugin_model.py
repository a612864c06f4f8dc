"""A class of transformers that this framework has no folder for, adapted and registered from outside."""

from __future__ import annotations

from typing import Any

import transformers

from mindspeed_mm.models.common.family import TEXT_TRAITS
from mindspeed_mm.models.common.modelzoo import ModelHub
from mindspeed_mm.models.transformers.base_model import FSDP2Mixin, WeightInitMixin


class Olmo2ForCausalLM(transformers.Olmo2ForCausalLM, FSDP2Mixin, WeightInitMixin):
    """OLMo 2. It keeps its name, which exports write into config.json."""

    # its decoder is `model`, and restarting positions keep the samples of a packed row apart
    traits = TEXT_TRAITS

    def freeze(self, config: Any) -> None:
        """Leave the first layers as they are; `frozen_layers` is a key of this file's own in model.json."""
        for layer in self.model.layers[: config.get("frozen_layers", 0)]:
            layer.requires_grad_(False)


ModelHub.register("my_olmo2", Olmo2ForCausalLM)
