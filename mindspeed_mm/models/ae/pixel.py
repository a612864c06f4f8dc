"""No autoencoder: latents are the pixels. For small runs, and for models of pixels."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.autoencoders.vae import DecoderOutput
from diffusers.models.modeling_outputs import AutoencoderKLOutput
from diffusers.models.modeling_utils import ModelMixin


class _Exactly:
    """A posterior without spread."""

    def __init__(self, value: torch.Tensor) -> None:
        self.mean, self.std = value, torch.zeros_like(value)

    def mode(self) -> torch.Tensor:
        return self.mean

    def sample(self, generator: Any = None) -> torch.Tensor:
        return self.mean


class PixelAutoencoder(ModelMixin, ConfigMixin):
    """Stands where diffusers' pipelines of videos expect an autoencoder, and changes nothing.

    With one channel a picture is reduced to its grey values (the mean of red, green and blue); decoding gives them to
    all three.
    """

    @register_to_config
    def __init__(self, channels: int = 3) -> None:
        """
        Args:
            channels: 1 or 3.
        """
        super().__init__()
        if channels not in (1, 3):
            raise ValueError(f"channels is {channels}; expected 1 (grey) or 3")
        self.register_to_config(
            z_dim=channels,
            latent_channels=channels,
            latents_mean=[0.0] * channels,
            latents_std=[1.0] * channels,
            scale_factor_temporal=1,
            scale_factor_spatial=1,
            temperal_downsample=[],
        )
        self.register_buffer("_where", torch.zeros(()), persistent=False)

    @property
    def dtype(self) -> torch.dtype:
        """Of computation."""
        return self._where.dtype

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self._where.device

    def encode(self, x: torch.Tensor, return_dict: bool = True) -> Any:
        """[batch, 3, frames, height, width] → a posterior that is exactly that, of `channels`."""
        value = x.mean(1, keepdim=True) if self.config["channels"] == 1 else x
        return AutoencoderKLOutput(latent_dist=_Exactly(value)) if return_dict else (_Exactly(value),)

    def decode(self, z: torch.Tensor, return_dict: bool = True) -> Any:
        """[batch, channels, frames, height, width] → [batch, 3, frames, height, width]."""
        video = z.expand(-1, 3, -1, -1, -1) if self.config["channels"] == 1 else z
        return DecoderOutput(sample=video) if return_dict else (video,)
