"""Stable Diffusion 3 and 3.5: text to image, with three text encoders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mindspeed_mm.models.generation.predictor.family import FamilyDefaults, PredictorFamily, register_predictor_family
from mindspeed_mm.models.generation.predictor.pictures import only_frame
from mindspeed_mm.utils.errors import DataError


@register_predictor_family
class StableDiffusion3(PredictorFamily):
    """diffusers' SD3Transformer2DModel."""

    names = ("sd3",)
    model_class_name = "SD3Transformer2DModel"
    pipelines = {"t2i": "StableDiffusion3Pipeline"}
    defaults = FamilyDefaults(shift=3.0, ae="AutoencoderKL", strides=(1, 8), text_length=256)

    @property
    def temporal_patch(self) -> int:
        """See the base class."""
        return 1

    def text_states(
        self, pipeline: Any, captions: Sequence[str], device: torch.device, max_length: int | None
    ) -> dict[str, torch.Tensor]:
        """See the base class."""
        captions = list(captions)
        states, _, pooled, _ = pipeline.encode_prompt(
            captions,
            captions,
            captions,
            device=device,
            do_classifier_free_guidance=False,
            max_sequence_length=max_length or self.defaults.text_length,
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
        self._check_size(*noisy.shape[-2:])
        return model(
            hidden_states=only_frame(noisy, "sd3"),
            timestep=timesteps,
            encoder_hidden_states=text["encoder_hidden_states"].to(noisy.dtype),
            pooled_projections=text["pooled_projections"].to(noisy.dtype),
            return_dict=False,
        )[0][:, :, None]

    def _check_size(self, height: int, width: int) -> None:
        longest = int(self.config["pos_embed_max_size"]) * self.spatial_patch
        if max(height, width) > longest:
            raise DataError(
                f"sd3: a picture has {height} × {width} latents, and the transformer's table of positions "
                f"(pos_embed_max_size {self.config['pos_embed_max_size']}) reaches {longest} on a side; expected "
                "smaller pictures (data.json: max_hxw, max_height, max_width)"
            )
