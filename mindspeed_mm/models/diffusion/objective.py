"""What an objective of diffusion training answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class Noised:
    """Samples at their timesteps.

    Attributes:
        noisy: [batch, channels, frames, height, width], what the predictor sees.
        target: what it is to predict, shaped alike.
        timesteps: [batch] float32 (int64 of a discrete schedule), what it is told.
        weights: [batch] float32, of the samples' losses.
    """

    noisy: torch.Tensor
    target: torch.Tensor
    timesteps: torch.Tensor
    weights: torch.Tensor


class Objective(Protocol):
    """Draws timesteps and makes noisy samples and targets."""

    def noised(self, latents: torch.Tensor, noise: torch.Tensor, draws: torch.Tensor, tokens: int) -> Noised:
        """Put noise on latents.

        Args:
            latents, noise: [batch, channels, frames, height, width] float32.
            draws: [batch] float64 in [0, 1): where in the range of timesteps each sample lies, by the density.
            tokens: of a sample, for a shift that follows it.
        """

    def sampling_scheduler(self) -> Any:
        """diffusers' scheduler with which a model trained this way is sampled."""
