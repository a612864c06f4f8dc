"""The interface of a diffusion training objective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class Noised:
    """Samples at their timesteps.

    Attributes:
        noisy: [batch, channels, frames, height, width], the predictor's input.
        target: the value to predict, of the same shape.
        timesteps: [batch] float32 (int64 of a discrete schedule), the model's input.
        weights: [batch] float32, weights of the samples' losses.
    """

    noisy: torch.Tensor
    target: torch.Tensor
    timesteps: torch.Tensor
    weights: torch.Tensor


class Objective(Protocol):
    """Draws timesteps, and computes noisy samples and targets."""

    def noised(self, latents: torch.Tensor, noise: torch.Tensor, draws: torch.Tensor, tokens: int) -> Noised:
        """Add noise to latents.

        Args:
            latents, noise: [batch, channels, frames, height, width] float32.
            draws: [batch] float64 in [0, 1): where in the range of timesteps each sample lies, by the density.
            tokens: number of tokens of a sample, for a shift that depends on it.
        """

    def sampling_scheduler(self) -> Any:
        """Return diffusers' scheduler for sampling from a model trained with this objective."""
