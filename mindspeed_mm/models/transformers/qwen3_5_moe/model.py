"""Class of Qwen3.5 with experts, whose layers of linear attention run the samples of packed rows apart."""

from __future__ import annotations

from typing import Any

from transformers import Qwen3_5MoeForConditionalGeneration as HFQwen3_5Moe
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeGatedDeltaNet

from mindspeed_mm.models.common.base_model import adapt_class
from mindspeed_mm.models.common.linear_attention import run_samples_apart


class Qwen3_5MoeForConditionalGeneration(adapt_class(HFQwen3_5Moe)):  # type: ignore[misc]
    """The transformers class, on packed rows too."""

    __module__ = HFQwen3_5Moe.__module__

    def __init__(self, config: Any) -> None:
        """
        Args:
            config: Qwen3_5MoeConfig.
        """
        super().__init__(config)
        for module in self.modules():
            if isinstance(module, Qwen3_5MoeGatedDeltaNet):
                run_samples_apart(module)
