"""Discrete diffusion against diffusers' DDPMScheduler."""

from __future__ import annotations

import pytest
import torch

from mindspeed_mm.configs.sora_config import DiffusionConfig
from mindspeed_mm.models.diffusion.build import build_objective
from mindspeed_mm.models.predictor.family import FamilyDefaults

DRAWS = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000


def _built(defaults=None, **keys):
    return build_objective(DiffusionConfig(model_id="ddpm", **keys), defaults or FamilyDefaults(), "model.json")


@pytest.mark.parametrize("kind", ["epsilon", "v_prediction", "sample"])
@pytest.mark.parametrize("schedule", ["linear", "scaled_linear", "squaredcos_cap_v2"])
def test_noise_and_target_are_the_schedulers(kind, schedule):
    from diffusers import DDPMScheduler

    curve = {"beta_start": 0.0002, "beta_end": 0.015, "beta_schedule": schedule}
    scheduler = DDPMScheduler(prediction_type=kind, **curve)
    latents, noise = torch.randn(2, 1000, 2, 1, 2, 2)
    noised = _built(prediction_type=kind, **curve).noised(latents, noise, DRAWS, 1)
    # from noise to data, each timestep once
    assert noised.timesteps.tolist() == list(range(999, -1, -1))
    torch.testing.assert_close(noised.noisy, scheduler.add_noise(latents, noise, noised.timesteps))
    target = {"epsilon": noise, "sample": latents}.get(kind)
    if target is None:
        target = scheduler.get_velocity(latents, noise, noised.timesteps)
    torch.testing.assert_close(noised.target, target)
    assert bool((noised.weights == 1).all())


def test_boundaries_confine_timesteps():
    much = _built(prediction_type="epsilon", max_timestep_boundary=0.3)
    little = _built(prediction_type="epsilon", min_timestep_boundary=0.3)
    zeros = torch.zeros(1000, 1, 1, 1, 1)
    assert set(much.noised(zeros, zeros, DRAWS, 1).timesteps.tolist()) == set(range(700, 1000))
    assert set(little.noised(zeros, zeros, DRAWS, 1).timesteps.tolist()) == set(range(700))


def test_the_ends_of_draws_are_timesteps():
    zeros = torch.zeros(2, 1, 1, 1, 1)
    draws = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    noised = _built(prediction_type="epsilon", num_train_timesteps=50).noised(zeros, zeros, draws, 1)
    assert noised.timesteps.tolist() == [49, 0]


def test_the_scheduler_that_samples_has_the_same_betas():
    from diffusers import DDPMScheduler

    curve = {"beta_schedule": "linear", "beta_end": 0.02, "beta_start": 0.0001}
    family = FamilyDefaults(objective="ddpm", prediction_type="v_prediction", **curve)
    objective = _built(family)
    assert objective.sampling_scheduler().config.prediction_type == "v_prediction"
    expected = DDPMScheduler(**curve).alphas_cumprod
    torch.testing.assert_close(objective.sampling_scheduler().alphas_cumprod, expected)
