"""Flux.1: text to image, with or without a guidance embedding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mindspeed_mm.models.generation.predictor.family import FamilyDefaults, register_predictor_family
from mindspeed_mm.models.generation.predictor.pictures import PACKED, PackedPictures, only_frame, pack, unpack


@register_predictor_family
class Flux(PackedPictures):
    """diffusers' FluxTransformer2DModel."""

    names = ("flux",)
    model_class_name = "FluxTransformer2DModel"
    pipelines = {"t2i": "FluxPipeline"}
    defaults = FamilyDefaults(dynamic_shift=True, ae="AutoencoderKL", strides=(1, 8), text_length=512)

    def text_states(
        self, pipeline: Any, captions: Sequence[str], device: torch.device, max_length: int | None
    ) -> dict[str, torch.Tensor]:
        """See the base class."""
        states, pooled, _ = pipeline.encode_prompt(
            list(captions), device=device, max_sequence_length=max_length or self.defaults.text_length
        )
        return {"encoder_hidden_states": states, "pooled_projections": pooled}

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
        from diffusers import FluxPipeline

        height, width = noisy.shape[-2:]
        states = text["encoder_hidden_states"].to(noisy.dtype)
        # whole numbers, as casting to a low precision would merge the positions of wide pictures
        ids = FluxPipeline._prepare_latent_image_ids(
            len(noisy), height // PACKED, width // PACKED, noisy.device, torch.long
        )
        scale = torch.full_like(timesteps, guidance) if self.config["guidance_embeds"] else None
        tokens = model(
            hidden_states=pack(only_frame(noisy, "flux")),
            timestep=timesteps / 1000,
            guidance=scale,
            pooled_projections=text["pooled_projections"].to(noisy.dtype),
            encoder_hidden_states=states,
            txt_ids=ids.new_zeros(states.shape[1], ids.shape[1]),
            img_ids=ids,
            return_dict=False,
        )[0]
        return unpack(tokens, height, width)
