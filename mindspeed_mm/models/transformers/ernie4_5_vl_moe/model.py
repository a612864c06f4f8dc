"""Class, parts and tower of ERNIE 4.5 VL, and the tower's smallest input."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import Ernie4_5_VLMoeForConditionalGeneration as HFErnie
from transformers.models.ernie4_5_vl_moe.modeling_ernie4_5_vl_moe import Ernie4_5_VLMoeMoeBlock

from mindspeed_mm.models.common.base_model import adapt_class
from mindspeed_mm.models.common.family import FamilyTraits
from mindspeed_mm.models.common.idle_tower import Tower, ZeroContribution
from mindspeed_mm.models.transformers.ernie4_5_vl_moe.batches import prepare_batch
from mindspeed_mm.models.transformers.qwen2_5_vl.batches import packed_positions


class Ernie4_5_VLMoeForConditionalGeneration(adapt_class(HFErnie)):  # type: ignore[misc]
    """The transformers class, whose layers run the experts of images and videos for texts, too.

    transformers runs them only where a micro-batch has such tokens, so a rank without media would skip their part of
    the collectives, and would have no gradients for them.
    """

    __module__ = HFErnie.__module__

    def __init__(self, config: Any) -> None:
        """
        Args:
            config: Ernie4_5_VLMoeConfig.
        """
        super().__init__(config)
        for module in self.modules():
            if isinstance(module, Ernie4_5_VLMoeMoeBlock):
                _IdleExperts(module)


class _IdleExperts:
    """Runs a block's vision experts on one token, with zero contribution, where a micro-batch has none for them."""

    def __init__(self, block: Any) -> None:
        self._ran = False
        block.vision_moe.register_forward_pre_hook(self._note)
        block.register_forward_hook(self._run)

    def _note(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._ran = True

    def _run(self, block: Any, args: tuple[Any, ...], output: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        ran, self._ran = self._ran, False
        if ran:
            return None
        # a real token: its gradient travels back between expert-parallel ranks as those of the other ranks do
        of_experts, _ = block.vision_moe(args[0].flatten(0, 1)[:1])
        self._ran = False
        hidden_states, router_logits = output
        return ZeroContribution.apply(hidden_states, of_experts), router_logits


def _run_one_token(model: Any, device: torch.device) -> torch.Tensor:
    """Run tower and resampler on the patches of one token, of zeros → [1, hidden]."""
    vision = model.config.vision_config
    side = vision.spatial_merge_size
    width = vision.in_channels * vision.patch_size**2
    pixels = torch.zeros(side * side, width, device=device, dtype=model.dtype)
    grid = torch.tensor([[1, side, side]], device=device)
    return torch.cat(list(model.model.get_image_features(pixels, grid, return_dict=True).pooler_output))


def _tower(pixels: str) -> Tower:
    """One of the two passes of the tower: a rank with images only runs that for videos, too."""
    return Tower("model.vision_tower", ("image", "video"), (pixels,), _run_one_token, beside=("model.resampler_model",))


TRAITS = FamilyTraits(
    language_model="model.language_model",
    parts={
        "vision_encoder": ("model.vision_tower",),
        "vision_projector": ("model.resampler_model",),
        "text_decoder": ("model.language_model", "lm_head"),
    },
    sub_configs={"vision_encoder": "vision_config", "text_decoder": "text_config"},
    towers=(_tower("pixel_values"), _tower("pixel_values_videos")),
    packed_positions=packed_positions,
    prepare_batch=prepare_batch,
    placeholders=("image", "video"),
    experts_of_kinds=("text_moe", "vision_moe"),
)
