"""Discrete diffusion against diffusers' DDPMScheduler."""

from __future__ import annotations

import pytest
import torch

from mindspeed_mm.configs.sora_config import DiffusionConfig
from mindspeed_mm.models.generation.diffusion.build import build_objective
from mindspeed_mm.models.generation.predictor.family import FamilyDefaults
from mindspeed_mm.utils.errors import ConfigError

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


@pytest.mark.parametrize(
    "keys",
    [
        {"rescale_betas_zero_snr": True},
        {"trained_betas": [0.1, 0.2, 0.3, 0.4], "num_train_timesteps": 4},
    ],
    ids=["zero-snr", "betas"],
)
def test_betas_that_a_file_names_are_trained_on(keys):
    from diffusers import DDPMScheduler

    keys = {"beta_start": 0.0002, "beta_end": 0.015, "beta_schedule": "linear", **keys}
    expected = DDPMScheduler(**keys).alphas_cumprod
    objective = _built(prediction_type="v_prediction", **keys)
    torch.testing.assert_close(objective.sampling_scheduler().alphas_cumprod, expected)
    clean, noise = torch.ones(2, len(expected), 1, 1, 1, 1)
    draws = (torch.arange(len(expected), dtype=torch.float64) + 0.5) / len(expected)
    noisy = objective.noised(clean, 0 * noise, draws, 1).noisy.flatten()
    torch.testing.assert_close(noisy, expected.flip(0).sqrt())


def test_a_family_with_zero_snr_trains_without_where_the_file_says_so():
    from diffusers import DDPMScheduler

    family = FamilyDefaults(objective="ddpm", scheduler_config={"rescale_betas_zero_snr": True})
    assert float(_built(family, prediction_type="epsilon").sampling_scheduler().alphas_cumprod[-1]) < 1e-6
    without = _built(family, prediction_type="epsilon", rescale_betas_zero_snr=False).sampling_scheduler()
    curve = {"beta_start": family.beta_start, "beta_end": family.beta_end, "beta_schedule": family.beta_schedule}
    torch.testing.assert_close(without.alphas_cumprod, DDPMScheduler(**curve).alphas_cumprod)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model_id": "ddpm", "trained_betas": [0.1]}, "has 1 numbers, and .* is 1000; there is one beta a timestep"),
        ({"model_id": "flow_matching", "rescale_betas_zero_snr": True}, "flow matching has no betas"),
    ],
)
def test_betas_that_do_not_fit(keys, message):
    with pytest.raises(ConfigError, match=message):
        build_objective(DiffusionConfig(**keys), FamilyDefaults(), "model.json")
