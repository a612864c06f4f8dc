"""Shared code of image families: one frame, and tokens of two by two latents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mindspeed_mm.models.generation.predictor.family import PredictorFamily
from mindspeed_mm.utils.errors import ConfigError, DataError

#: latent rows and columns of a packed token
PACKED = 2


def only_frame(latents: torch.Tensor, name: str) -> torch.Tensor:
    """Return latents [batch, channels, 1, height, width] as [batch, channels, height, width].

    Raises:
        DataError: there are several frames.
    """
    frames = latents.shape[2]
    if frames != 1:
        raise DataError(
            f"{name} makes pictures, and a sample has {frames} latent frames; expected 1 (data.json: num_frames: 1)"
        )
    return latents[:, :, 0]


def pack(latents: torch.Tensor) -> torch.Tensor:
    """Pack [batch, channels, height, width] as in diffusers' pipelines: [batch, height/2 · width/2, channels · 4]."""
    from diffusers import FluxPipeline

    batch, channels, height, width = latents.shape
    return FluxPipeline._pack_latents(latents, batch, channels, height, width)


def unpack(tokens: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Undo `pack` for latents of this height and width; return [batch, channels, 1, height, width]."""
    from diffusers import FluxPipeline

    return FluxPipeline._unpack_latents(tokens, height, width, 1)[:, :, None]


class PackedPictures(PredictorFamily):
    """A family whose transformer takes packed tokens; its `in_channels` counts the four latents of one."""

    @property
    def spatial_patch(self) -> int:
        """See the base class."""
        return PACKED

    @property
    def temporal_patch(self) -> int:
        """See the base class."""
        return 1

    @property
    def latent_channels(self) -> int:
        """See the base class."""
        return int(self.config["in_channels"]) // PACKED**2


def refuse(config: Mapping[str, Any], key: str, name: str) -> None:
    """Refuse a configuration of another task.

    Raises:
        ConfigError: `key` is set.
    """
    if config.get(key):
        raise ConfigError(
            f"predictor: {key} is {config[key]} in the transformer's configuration; {name} is trained to make pictures "
            f"of captions, and this is a model that edits or takes pictures apart; expected {key}: false"
        )
