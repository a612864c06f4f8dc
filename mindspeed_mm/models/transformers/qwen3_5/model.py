"""Class, parts and tower of Qwen3.5, whose layers of linear attention run the samples of packed rows apart."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import Qwen3_5ForConditionalGeneration as HFQwen3_5
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from mindspeed_mm.models.common.base_model import adapt_class
from mindspeed_mm.models.common.linear_attention import packed_masks_by_layer_type, run_samples_apart
from mindspeed_mm.models.transformers.qwen2_5_vl.grids import interpolated_inputs
from mindspeed_mm.models.transformers.qwen2_5_vl.traits import TRAITS as QWEN2_5_VL
from mindspeed_mm.models.transformers.qwen2_5_vl.traits import grid_tower

TRAITS = dataclasses.replace(
    QWEN2_5_VL,
    towers=(grid_tower(interpolated_inputs),),
    packed_masks=packed_masks_by_layer_type,
    attention="causal or linear",
)


class Qwen3_5ForConditionalGeneration(adapt_class(HFQwen3_5)):  # type: ignore[misc]
    """The transformers class, on packed rows too."""

    __module__ = HFQwen3_5.__module__

    def __init__(self, config: Any) -> None:
        """
        Args:
            config: Qwen3_5Config.
        """
        super().__init__(config)
        for module in self.modules():
            if isinstance(module, Qwen3_5GatedDeltaNet):
                run_samples_apart(module)
