"""Discrete diffusion with betas: diffusers' own schedulers add the noise."""

from __future__ import annotations

from typing import Any

import torch

from mindspeed_mm.configs.sora_config import DiffusionConfig
from mindspeed_mm.models.generation.diffusion.objective import Noised
from mindspeed_mm.utils.device import move_to_device


class Ddpm:
    """Denoising diffusion (Ho et al. 2020; v-prediction of Salimans and Ho 2022).

    noisy = √ᾱ_t · latents + √(1 - ᾱ_t) · noise; predicted is the noise (epsilon), √ᾱ_t · noise - √(1 - ᾱ_t) · latents
    (v_prediction) or the latents (sample). Timesteps are drawn uniformly between the boundaries.
    """

    def __init__(self, scheduler: Any, lowest: float = 0.0, highest: float = 1.0) -> None:
        """
        Args:
            scheduler: a diffusers scheduler with `alphas_cumprod`.
            lowest, highest: boundaries of draws, as shares of the range from noise (0) to data (1).
        """
        self._scheduler = scheduler
        self._alphas = scheduler.alphas_cumprod.double()
        self._lowest, self._highest = lowest, highest

    def noised(self, latents: torch.Tensor, noise: torch.Tensor, draws: torch.Tensor, tokens: int) -> Noised:
        """See `Objective`."""
        steps = len(self._alphas)
        places = self._lowest + draws * (self._highest - self._lowest)
        timesteps = (steps - 1 - (places * steps).floor().long()).clamp(0, steps - 1)
        alphas = move_to_device(self._alphas[timesteps], latents.device).view(-1, *(1 for _ in latents.shape[1:]))
        kept, added = alphas.sqrt().to(latents.dtype), (1 - alphas).sqrt().to(latents.dtype)
        kind = self._scheduler.config.prediction_type
        if kind == "epsilon":
            target = noise
        elif kind == "sample":
            target = latents
        else:
            target = kept * noise - added * latents
        # integers, which aren't rounded when a model's inputs are cast
        timesteps = move_to_device(timesteps, latents.device)
        return Noised(kept * latents + added * noise, target, timesteps, latents.new_ones(len(latents)))

    def sampling_scheduler(self) -> Any:
        """See `Objective`."""
        return self._scheduler


def ddpm(config: DiffusionConfig, defaults: Any) -> Ddpm:
    """Build from model.json's `diffusion`, with the family's defaults."""
    import diffusers

    by_family = defaults.objective == "ddpm"
    settings = {
        "num_train_timesteps": config.num_train_timesteps,
        "beta_start": defaults.beta_start if config.beta_start is None else config.beta_start,
        "beta_end": defaults.beta_end if config.beta_end is None else config.beta_end,
        "beta_schedule": config.beta_schedule or defaults.beta_schedule,
        "prediction_type": config.prediction_type or (defaults.prediction_type if by_family else "epsilon"),
        **(defaults.scheduler_config if by_family else {}),
    }
    if config.trained_betas is not None:
        settings["trained_betas"] = config.trained_betas
    if config.rescale_betas_zero_snr is not None:
        settings["rescale_betas_zero_snr"] = config.rescale_betas_zero_snr
    scheduler = getattr(diffusers, defaults.scheduler)(**settings)
    return Ddpm(scheduler, config.min_timestep_boundary, config.max_timestep_boundary)
