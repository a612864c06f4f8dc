"""HunyuanVideo: text to video, with a pooled caption and a guidance embedding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mindspeed_mm.models.generation.predictor.family import FamilyDefaults, PredictorFamily, register_predictor_family


@register_predictor_family
class HunyuanVideo(PredictorFamily):
    """diffusers' HunyuanVideoTransformer3DModel.

    Captions go through a language model (states of its third last layer, without the template's tokens) and through
    CLIP (pooled). Timesteps are logit-normal (HunyuanVideo technical report, 2024) and shifted as the published
    scheduler does it. Image to video isn't offered: there the language model reads the picture with the caption.
    """

    names = ("hunyuanvideo",)
    model_class_name = "HunyuanVideoTransformer3DModel"
    pipelines = {"t2v": "HunyuanVideoPipeline"}
    defaults = FamilyDefaults(shift=7.0, ae="AutoencoderKLHunyuanVideo", strides=(4, 8), text_length=256)

    def text_states(
        self, pipeline: Any, captions: Sequence[str], device: torch.device, max_length: int | None
    ) -> dict[str, torch.Tensor]:
        """See the base class."""
        states, pooled, mask = pipeline.encode_prompt(
            list(captions), device=device, max_sequence_length=max_length or self.defaults.text_length
        )
        return {"encoder_hidden_states": states, "encoder_attention_mask": mask, "pooled_projections": pooled}

    def predict(
        self,
        model: nn.Module,
        noisy: torch.Tensor,
        timesteps: torch.Tensor,
        text: Mapping[str, torch.Tensor],
        conditions: Mapping[str, torch.Tensor],
        guidance: float,
    ) -> torch.Tensor:
        """See the base class; a guidance of 6 is passed as 6000, as in HunyuanVideoPipeline."""
        scaled = timesteps.new_full((len(noisy),), guidance * 1000) if self.config["guidance_embeds"] else None
        return model(
            hidden_states=noisy,
            timestep=timesteps,
            encoder_hidden_states=text["encoder_hidden_states"].to(noisy.dtype),
            encoder_attention_mask=text["encoder_attention_mask"].to(noisy.dtype),
            pooled_projections=text["pooled_projections"].to(noisy.dtype),
            guidance=scaled,
            return_dict=False,
        )[0]
