"""An identity autoencoder, whose latents are the pixels, for small runs and for models of pixels."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.autoencoders.vae import DecoderOutput
from diffusers.models.modeling_outputs import AutoencoderKLOutput
from diffusers.models.modeling_utils import ModelMixin
from torch import nn


class _Exactly:
    """A posterior without spread."""

    def __init__(self, value: torch.Tensor) -> None:
        self.mean, self.std = value, torch.zeros_like(value)

    def mode(self) -> torch.Tensor:
        return self.mean

    def sample(self, generator: Any = None) -> torch.Tensor:
        return self.mean


def _derived(channels: int) -> dict[str, Any]:
    """Return the values that pipelines read from an autoencoder's configuration."""
    return {
        "z_dim": channels,
        "latent_channels": channels,
        "latents_mean": [0.0] * channels,
        "latents_std": [1.0] * channels,
        "scale_factor_temporal": 1,
        "scale_factor_spatial": 1,
        "temporal_compression_ratio": 1,
        "spatial_compression_ratio": 1,
        "temperal_downsample": [],
        "block_out_channels": [channels],
        "scaling_factor": 1.0,
        "shift_factor": 0.0,
        "timestep_conditioning": False,
    }


class PixelAutoencoder(ModelMixin, ConfigMixin):
    """An autoencoder for diffusers' pipelines whose latents are the pixels themselves.

    With one channel a picture is reduced to its grey values (the mean of red, green and blue); decoding gives them to
    all three. A pipeline's directory with one in it loads once this module has been imported: model_index.json names
    it, and diffusers imports no module for a file's sake.
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
        self.temporal_compression_ratio = self.spatial_compression_ratio = 1
        self.temperal_downsample: list[bool] = []
        self.register_buffer("latents_mean", torch.zeros(channels), persistent=False)
        self.register_buffer("latents_std", torch.ones(channels), persistent=False)
        # states dtype and device; stored, as diffusers loads no model without a file of tensors
        self.register_buffer("place", torch.zeros(()))
        # last: diffusers lets configuration be read as attributes, and buffers take no name that is taken
        self.register_to_config(**_derived(channels))

    @classmethod
    def extract_init_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Leave out the keys that are there for pipelines alone; diffusers would warn about them."""
        derived = _derived(1)
        return super().extract_init_dict({k: v for k, v in config_dict.items() if k not in derived}, **kwargs)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the computation."""
        return self.place.dtype

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self.place.device

    def to(self, *args: Any, **kwargs: Any) -> PixelAutoencoder:
        """Move as any module does; diffusers' own method warns about parts to keep in float32, and there are none."""
        return nn.Module.to(self, *args, **kwargs)

    def encode(self, x: torch.Tensor, return_dict: bool = True) -> Any:
        """Encode [batch, 3, frames, height, width], or without frames, into a posterior of exactly these pixels."""
        value = x.mean(1, keepdim=True) if self.config["channels"] == 1 else x
        return AutoencoderKLOutput(latent_dist=_Exactly(value)) if return_dict else (_Exactly(value),)

    def decode(self, z: torch.Tensor, temb: Any = None, return_dict: bool = True) -> Any:
        """Decode [batch, channels, frames, height, width], or without frames, into the same with 3 channels."""
        video = z.expand(-1, 3, *z.shape[2:]) if self.config["channels"] == 1 else z
        return DecoderOutput(sample=video) if return_dict else (video,)
