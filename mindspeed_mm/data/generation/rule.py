"""What a generation model asks of its samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class GenerationRule:
    """Shapes that a model's autoencoder and transformer can take.

    Attributes:
        temporal_stride: frames that a latent frame stands for; a clip has `k * temporal_stride + 1` of them.
        spatial_multiple: height and width in pixels are multiples of this (autoencoder stride × patch).
        temporal_patch: latent frames of a token.
        text_dropout: probability that a caption is left out; None: data.json says it.
        seed: of the run, from which samples' keys are made.
        made_by: the autoencoder's name, for messages.
        needs_conditions: whether the model is told of a sample beside its caption.
        features_of: what features must have been made from, by the keys of their features.json; others are free.
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
        """Tokens that the transformer sees of a clip."""
        latent_frames = (frames - 1) // self.temporal_stride + 1
        area = (height // self.spatial_multiple) * (width // self.spatial_multiple)
        return -(-latent_frames // self.temporal_patch) * area
