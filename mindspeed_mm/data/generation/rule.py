"""The shapes and settings of samples that a generation model takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class GenerationRule:
    """Shapes that a model's autoencoder and transformer can take.

    Attributes:
        temporal_stride: frames per latent frame; a clip has `k * temporal_stride + 1` of them.
        spatial_multiple: height and width in pixels are multiples of this (autoencoder stride × patch).
        temporal_patch: latent frames of a token.
        text_dropout: probability that a caption is dropped; None: data.json sets it.
        seed: seed of the run, for the keys of samples.
        made_by: the autoencoder's name, for messages.
        needs_conditions: whether the model has conditions beside the caption.
        features_of: required settings of features, by the keys of their features.json; others are free.
    """

    temporal_stride: int = 1
    spatial_multiple: int = 1
    temporal_patch: int = 1
    text_dropout: float | None = None
    seed: int = 1234
    made_by: str = "the model"
    needs_conditions: bool = False
    features_of: Mapping[str, Any] = field(default_factory=dict)

    def frames_near(self, frames: int) -> int:
        """The largest number of frames up to `frames` that fits, at least 1."""
        return max(1, (frames - 1) // self.temporal_stride * self.temporal_stride + 1)

    def fits(self, frames: int, height: int, width: int) -> bool:
        """Whether a clip of this shape can be encoded."""
        return (
            frames >= 1
            and (frames - 1) % self.temporal_stride == 0
            and height % self.spatial_multiple == 0
            and width % self.spatial_multiple == 0
        )

    def tokens(self, frames: int, height: int, width: int) -> int:
        """Number of tokens of a clip in the transformer."""
        latent_frames = (frames - 1) // self.temporal_stride + 1
        area = (height // self.spatial_multiple) * (width // self.spatial_multiple)
        return -(-latent_frames // self.temporal_patch) * area
