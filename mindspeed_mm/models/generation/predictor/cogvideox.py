"""CogVideoX and CogVideoX 1.5: v-prediction with discrete timesteps; text to video, image to video."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from mindspeed_mm.models.generation.predictor.family import FamilyDefaults, PredictorFamily, register_predictor_family

#: value of the offset embedding that CogVideoXImageToVideoPipeline gives to models that have one (1.5, image to video)
OFFSET = 2.0


@register_predictor_family
class CogVideoX(PredictorFamily):
    """diffusers' CogVideoXTransformer3DModel: 2B with sine positions, 5B and 1.5 with rotary ones.

    The noise schedule is that of the published schedulers (CogVideoX technical report, 2024: v-prediction, zero
    terminal signal-to-noise ratio); 2B shifts the ratio by 3, the others don't. A plain loss on v is the published
    fine-tuning loss: the squared error of the clean latents times 1 / (1 - alphas_cumprod).
    """

    names = ("cogvideox",)
    model_class_name = "CogVideoXTransformer3DModel"
    pipelines = {"t2v": "CogVideoXPipeline", "i2v": "CogVideoXImageToVideoPipeline"}
    defaults = FamilyDefaults(
        objective="ddpm",
        prediction_type="v_prediction",
        scheduler="CogVideoXDDIMScheduler",
        scheduler_config={
            "snr_shift_scale": 3.0,
            "rescale_betas_zero_snr": True,
            "timestep_spacing": "trailing",
            "clip_sample": False,
        },
        ae="AutoencoderKLCogVideoX",
        strides=(4, 8),
        text_length=226,
    )

    def __init__(self, task: str, config: Mapping[str, Any]) -> None:
        """See the base class."""
        super().__init__(task, config)
        if config.get("use_rotary_positional_embeddings"):
            schedule = {**self.defaults.scheduler_config, "snr_shift_scale": 1.0}
            self.defaults = replace(self.defaults, scheduler_config=schedule)

    @property
    def latent_channels(self) -> int:
        """See the base class: with an image, the transformer's input channels are twice the latent's."""
        return int(self.config.get("out_channels") or self.config["in_channels"])

    def text_states(
        self, pipeline: Any, captions: Sequence[str], device: torch.device, max_length: int | None
    ) -> dict[str, torch.Tensor]:
        """See the base class."""
        states, _ = pipeline.encode_prompt(
            list(captions),
            do_classifier_free_guidance=False,
            max_sequence_length=max_length or self.config.get("max_text_seq_length") or self.defaults.text_length,
            device=device,
        )
        return {"encoder_hidden_states": states}

    def padded(self, latents: torch.Tensor) -> torch.Tensor:
        """See the base class: 1.5 repeats the first latent frame in front until tokens are whole."""
        missing = -latents.shape[2] % self.temporal_patch
        return torch.cat([latents[:, :, :1].expand(-1, -1, missing, -1, -1), latents], 2) if missing else latents

    def conditions(self, parts: Any, video: torch.Tensor, latents: torch.Tensor) -> dict[str, torch.Tensor]:
        """See the base class: the first frame's latents, then zeros."""
        if self.task == "t2v":
            return {}
        first = parts.ae.encode(video[:, :, :1]).mean
        settings = parts.ae.model.config
        if settings.get("invert_scale_latents"):
            # CogVideoX 1.5 was trained on pictures that were divided by the factor, where clips were multiplied by it
            first = first / float(settings["scaling_factor"]) ** 2
        return {"condition": torch.cat([first, torch.zeros_like(latents[:, :, 1:])], 2)}

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
        frames, height, width = noisy.shape[2:]
        if "condition" in conditions:
            # of the frames that 1.5 has in front, the very first one is conditioned on the picture, as in the pipeline
            shown = conditions["condition"].to(noisy.dtype)
            shown = nn.functional.pad(shown, (0, 0, 0, 0, 0, frames - shown.shape[2]))
            noisy = torch.cat([noisy, shown], 1)
        has_offset = self.config.get("ofs_embed_dim") is not None
        predicted = model(
            hidden_states=noisy.transpose(1, 2),
            encoder_hidden_states=text["encoder_hidden_states"].to(noisy.dtype),
            timestep=timesteps,
            ofs=noisy.new_full((1,), OFFSET) if has_offset else None,
            image_rotary_emb=self._positions(frames, height, width, noisy.device),
            return_dict=False,
        )[0]
        return predicted.transpose(1, 2)

    def _positions(
        self, frames: int, height: int, width: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Rotary angles of a latent's tokens, by the pipeline's own method; None where positions are sines."""
        if not self.config.get("use_rotary_positional_embeddings"):
            return None
        from diffusers import CogVideoXPipeline

        # what the method reads of a pipeline; sizes are of the latent, so the autoencoder's stride is 1
        sizes = SimpleNamespace(
            vae_scale_factor_spatial=1, transformer=SimpleNamespace(config=SimpleNamespace(**self.config))
        )
        positions: Any = CogVideoXPipeline._prepare_rotary_positional_embeddings
        return positions(sizes, height, width, frames, device)
