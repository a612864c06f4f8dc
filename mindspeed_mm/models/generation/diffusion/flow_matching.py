"""Flow matching on straight paths: noisy = (1 - sigma) · latents + sigma · noise, predicted is noise - latents."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from mindspeed_mm.configs.sora_config import DiffusionConfig
from mindspeed_mm.models.generation.diffusion.objective import Noised
from mindspeed_mm.utils.device import move_to_device


@dataclass(frozen=True)
class FlowMatching:
    """Rectified flow (Liu et al. 2022; Esser et al. 2024 for densities and weights).

    A draw u in [0, 1) becomes a position s by the density: itself (uniform), sigmoid(mean + std · Φ⁻¹(u))
    (logit_normal), or 1 - u - scale · (cos²(πu/2) - 1 + u) (mode). The shift moves it towards noise:
    sigma = shift · s / (1 + (shift - 1) · s). With `table`, positions lie on a table of that many steps, from noise
    (1) to data, as published Wan training does it, and draws are confined to the part of it between the boundaries.

    Attributes:
        steps: timesteps of the schedule; the predictor's input is sigma · steps.
        table: draw from a table of sigmas, not from all values.
        dynamic: (base shift, max shift, base tokens, max tokens) of a shift exp(mu) that grows with the tokens.
        lowest, highest: boundaries of draws, as shares of the range from noise (0) to data (1).
        scheduler_config: further settings of the scheduler that samples.
    """

    steps: int = 1000
    shift: float = 1.0
    sampling: str = "uniform"
    logit_mean: float = 0.0
    logit_std: float = 1.0
    mode_scale: float = 1.29
    weighting: str = "uniform"
    table: bool = False
    sigma_min: float = 0.0
    extra_one_step: bool = True
    lowest: float = 0.0
    highest: float = 1.0
    dynamic: tuple[float, float, int, int] | None = None
    scheduler_config: Mapping[str, Any] = field(default_factory=dict)

    def noised(self, latents: torch.Tensor, noise: torch.Tensor, draws: torch.Tensor, tokens: int) -> Noised:
        """See `Objective`."""
        sigmas = self.sigmas(draws, tokens)
        weights = self.weights(sigmas, tokens)
        on_device, weights = move_to_device((sigmas, weights), latents.device, latents.dtype)
        spread = on_device.view(-1, *(1 for _ in latents.shape[1:]))
        noisy = (1 - spread) * latents + spread * noise
        return Noised(noisy, noise - latents, on_device * self.steps, weights)

    def sigmas(self, draws: torch.Tensor, tokens: int) -> torch.Tensor:
        """Return the noise levels of draws: [batch] float64."""
        if self.table:
            first, last = int(self.lowest * self.steps), int(self.highest * self.steps)
            places = (first + (draws * (last - first)).floor()).long().clamp(max=self.steps - 1)
            return self._table(tokens)[places]
        if self.sampling == "logit_normal":
            edge = 1e-12
            normal = torch.special.ndtri(draws.clamp(edge, 1 - edge))
            positions = torch.sigmoid(self.logit_mean + self.logit_std * normal)
        elif self.sampling == "mode":
            positions = 1 - draws - self.mode_scale * (torch.cos(math.pi * draws / 2) ** 2 - 1 + draws)
        else:
            positions = 1 - draws  # from noise (0) to data (1), as boundaries are counted
        if (self.lowest, self.highest) != (0.0, 1.0):
            positions = 1 - (self.lowest + (1 - positions) * (self.highest - self.lowest))
        return self._shifted(positions, tokens)

    def weights(self, sigmas: torch.Tensor, tokens: int) -> torch.Tensor:
        """Return the weights of the losses at noise levels: [batch] float64.

        gaussian: exp(-2 ((t - T/2) / T)²) over timesteps t of T, moved down to 0 at its smallest and scaled to mean 1
        over the table. sigma_sqrt: sigma⁻², no larger than at the last of the timesteps. cosmap:
        2 / (π (1 - 2 sigma + 2 sigma²)) (Esser et al. 2024).
        """
        if self.weighting == "gaussian":
            table = _bell(self._table(tokens) * self.steps, self.steps)
            lowest = table.min()
            return (_bell(sigmas * self.steps, self.steps) - lowest) * self.steps / (table - lowest).sum()
        if self.weighting == "sigma_sqrt":
            return sigmas.clamp(min=1 / self.steps) ** -2.0
        if self.weighting == "cosmap":
            return 2 / (math.pi * (1 - 2 * sigmas + 2 * sigmas**2))
        return torch.ones_like(sigmas)

    def sampling_scheduler(self) -> Any:
        """See `Objective`."""
        from diffusers import FlowMatchEulerDiscreteScheduler

        if self.dynamic is None:
            return FlowMatchEulerDiscreteScheduler(
                num_train_timesteps=self.steps, shift=self.shift, **self.scheduler_config
            )
        base_shift, max_shift, base_tokens, max_tokens = self.dynamic
        return FlowMatchEulerDiscreteScheduler(
            num_train_timesteps=self.steps,
            use_dynamic_shifting=True,
            base_shift=base_shift,
            max_shift=max_shift,
            base_image_seq_len=base_tokens,
            max_image_seq_len=max_tokens,
            **self.scheduler_config,
        )

    def _table(self, tokens: int) -> torch.Tensor:
        count = self.steps + 1 if self.extra_one_step else self.steps
        return self._shifted(torch.linspace(1.0, self.sigma_min, count, dtype=torch.float64)[: self.steps], tokens)

    def _shifted(self, positions: torch.Tensor, tokens: int) -> torch.Tensor:
        shift = self.shift
        if self.dynamic is not None:
            base_shift, max_shift, base_tokens, max_tokens = self.dynamic
            slope = (max_shift - base_shift) / (max_tokens - base_tokens)
            shift = math.exp(base_shift + slope * (tokens - base_tokens))
        return shift * positions / (1 + (shift - 1) * positions)


def _bell(timesteps: torch.Tensor, steps: int) -> torch.Tensor:
    return torch.exp(-2 * ((timesteps - steps / 2) / steps) ** 2)


def flow_matching(config: DiffusionConfig, defaults: Any) -> FlowMatching:
    """Build from model.json's `diffusion`, with the family's defaults."""
    dynamic = None
    if config.use_dynamic_shifting or (defaults.dynamic_shift and config.training_shift is None):
        base_shift, max_shift, base_tokens, max_tokens = defaults.shift_range
        dynamic = (
            base_shift if config.base_shift is None else config.base_shift,
            max_shift if config.max_shift is None else config.max_shift,
            config.base_seq_len or base_tokens,
            config.max_seq_len or max_tokens,
        )
    wan = config.model_id == "wan_flow_match_scheduler"
    return FlowMatching(
        steps=config.num_train_timesteps,
        shift=defaults.shift if config.training_shift is None else config.training_shift,
        sampling="uniform" if wan else config.density or defaults.sampling,
        logit_mean=config.logit_mean,
        logit_std=config.logit_std,
        mode_scale=config.mode_scale,
        weighting=config.weighting or ("gaussian" if wan else defaults.weighting),
        table=wan,
        sigma_min=config.sigma_min,
        extra_one_step=config.extra_one_step,
        lowest=config.min_timestep_boundary,
        highest=config.max_timestep_boundary,
        dynamic=dynamic,
        scheduler_config=defaults.scheduler_config if defaults.objective == "flow_matching" else {},
    )
