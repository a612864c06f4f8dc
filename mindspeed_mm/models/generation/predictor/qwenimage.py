"""Qwen-Image: text to image; captions go through a chat template of Qwen2.5-VL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mindspeed_mm.models.generation.predictor.family import FamilyDefaults, register_predictor_family
from mindspeed_mm.models.generation.predictor.pictures import PACKED, PackedPictures, only_frame, pack, refuse, unpack


@register_predictor_family
class QwenImage(PackedPictures):
    """diffusers' QwenImageTransformer2DModel."""

    names = ("qwenimage",)
    model_class_name = "QwenImageTransformer2DModel"
    pipelines = {"t2i": "QwenImagePipeline"}
    defaults = FamilyDefaults(
        dynamic_shift=True,
        shift_range=(0.5, 0.9, 256, 8192),
        scheduler_config={"shift_terminal": 0.02},
        ae="AutoencoderKLQwenImage",
        strides=(4, 8),
        text_length=512,
    )

    def __init__(self, task: str, config: Mapping[str, Any]) -> None:
        super().__init__(task, config)
        for key in ("use_additional_t_cond", "use_layer3d_rope"):
            refuse(config, key, "qwenimage")

    def text_states(
        self, pipeline: Any, captions: Sequence[str], device: torch.device, max_length: int | None
    ) -> dict[str, torch.Tensor]:
        """See the base class."""
        states, mask = pipeline.encode_prompt(
            list(captions), device=device, max_sequence_length=max_length or self.defaults.text_length
        )
        if mask is None:  # all of them are as long as the longest; batches of others have to know
            mask = torch.ones(states.shape[:2], dtype=torch.long, device=states.device)
        return {"encoder_hidden_states": states, "encoder_hidden_states_mask": mask}

    def predict(
        self,
        model: nn.Module,
        noisy: torch.Tensor,
        timesteps: torch.Tensor,
        text: Mapping[str, torch.Tensor],
        conditions: Mapping[str, torch.Tensor],
        guidance: float,
    ) -> torch.Tensor:
        """See the base class."""
        height, width = noisy.shape[-2:]
        tokens = model(
            hidden_states=pack(only_frame(noisy, "qwenimage")),
            timestep=timesteps / 1000,
            encoder_hidden_states=text["encoder_hidden_states"].to(noisy.dtype),
            encoder_hidden_states_mask=text["encoder_hidden_states_mask"].bool(),
            img_shapes=[[(1, height // PACKED, width // PACKED)]] * len(noisy),
            return_dict=False,
        )[0]
        return unpack(tokens, height, width)
