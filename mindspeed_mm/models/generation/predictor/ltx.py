"""LTX-Video: tokens of one latent each, positions in seconds and pixels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mindspeed_mm.models.generation.predictor.family import FamilyDefaults, PredictorFamily, register_predictor_family

#: frames a second that positions in time are counted with: LTXPipeline's default
FRAME_RATE = 25


@register_predictor_family
class Ltx(PredictorFamily):
    """diffusers' LTXVideoTransformer3DModel.

    The shift follows the number of tokens, between the values of the published scheduler: logit-normal timesteps
    shifted by exp(mu) are those whose normal distribution has the mean mu.
    """

    names = ("ltx",)
    model_class_name = "LTXVideoTransformer3DModel"
    pipelines = {"t2v": "LTXPipeline", "i2v": "LTXImageToVideoPipeline"}
    defaults = FamilyDefaults(
        dynamic_shift=True,
        shift_range=(0.95, 2.05, 1024, 4096),
        scheduler_config={"shift_terminal": 0.1},
        ae="AutoencoderKLLTXVideo",
        strides=(8, 32),
        text_length=128,
    )

    def text_states(
        self, pipeline: Any, captions: Sequence[str], device: torch.device, max_length: int | None
    ) -> dict[str, torch.Tensor]:
        """See the base class."""
        states, mask, _, _ = pipeline.encode_prompt(
            list(captions),
            do_classifier_free_guidance=False,
            max_sequence_length=max_length or self.defaults.text_length,
            device=device,
        )
        return {"encoder_hidden_states": states, "encoder_attention_mask": mask}

    def conditions(self, parts: Any, video: torch.Tensor, latents: torch.Tensor) -> dict[str, torch.Tensor]:
        """See the base class: the first latent frame is known, and its tokens have no noise."""
        if self.task == "t2v":
            return {}
        known = torch.zeros_like(latents[:, :1])
        known[:, :, 0] = 1
        first = parts.ae.encode(video[:, :, :1]).mean
        return {"known_latents": first.expand_as(latents).contiguous(), "known": known}

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
        from diffusers import LTXPipeline

        patches = (self.spatial_patch, self.temporal_patch)
        if "known" in conditions:
            # LTXImageToVideoPipeline: a timestep for each token, 0 for those of the first frame
            known = LTXPipeline._pack_latents(conditions["known"], *patches)[..., 0]
            timesteps = timesteps[:, None] * (1 - known.to(timesteps.dtype))
        frames, height, width = noisy.shape[2:]
        temporal, spatial = self.defaults.strides
        packed = model(
            hidden_states=LTXPipeline._pack_latents(noisy, *patches),
            encoder_hidden_states=text["encoder_hidden_states"].to(noisy.dtype),
            timestep=timesteps,
            encoder_attention_mask=text["encoder_attention_mask"],
            num_frames=frames,
            height=height,
            width=width,
            rope_interpolation_scale=(temporal / FRAME_RATE, spatial, spatial),
            return_dict=False,
        )[0]
        return LTXPipeline._unpack_latents(packed, frames, height, width, *patches)
