"""Flow matching against diffusers' schedulers and training helpers."""

from __future__ import annotations

import pytest
import torch

from mindspeed_mm.configs.sora_config import DiffusionConfig
from mindspeed_mm.models.generation.diffusion.build import build_objective
from mindspeed_mm.models.generation.diffusion.flow_matching import FlowMatching
from mindspeed_mm.models.generation.predictor.family import FamilyDefaults
from mindspeed_mm.utils.errors import ConfigError

EVEN = (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000
SHARES = torch.tensor([0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99], dtype=torch.float64)


def _built(defaults=None, **keys):
    return build_objective(DiffusionConfig(**keys), defaults or FamilyDefaults(), "model.json")


@pytest.mark.parametrize(
    ("scheme", "keys"),
    [
        ("logit_normal", {}),
        ("logit_normal", {"logit_mean": 0.7, "logit_std": 1.6}),
        ("mode", {}),
        ("mode", {"mode_scale": 0.6}),
        ("uniform", {}),
    ],
)
def test_densities_are_diffusers(scheme, keys):
    from diffusers.training_utils import compute_density_for_timestep_sampling

    said = {"logit_mean": 0.0, "logit_std": 1.0, "mode_scale": 1.29, **keys}
    theirs = compute_density_for_timestep_sampling(
        scheme, 200_000, generator=torch.Generator().manual_seed(0), **said
    ).double()
    ours = _built(sampling=scheme, **keys).sigmas(EVEN, 1)
    assert ours.dtype == torch.float64
    torch.testing.assert_close(ours.quantile(SHARES), theirs.quantile(SHARES), rtol=0, atol=5e-3)


@pytest.mark.parametrize("scheme", ["sigma_sqrt", "cosmap", "uniform"])
def test_weights_are_diffusers(scheme):
    from diffusers.training_utils import compute_loss_weighting_for_sd3

    sigmas = torch.linspace(1, 0.001, 1000, dtype=torch.float64)
    ours = _built(weighting=scheme).weights(sigmas, 1)
    theirs = compute_loss_weighting_for_sd3("none" if scheme == "uniform" else scheme, sigmas)
    torch.testing.assert_close(ours, theirs.double())


def test_a_weight_stays_finite_where_no_noise_is_left():
    weights = _built(weighting="sigma_sqrt").weights(torch.tensor([1e-9, 1e-3], dtype=torch.float64), 1)
    assert weights.tolist() == pytest.approx([1e6, 1e6])


def test_gaussian_weights_have_mean_one_over_the_table_and_are_largest_in_the_middle():
    objective = _built(model_id="wan_flow_match_scheduler", shift=5.0)
    sigmas = objective._table(1)
    weights = objective.weights(sigmas, 1)
    assert float(weights.mean()) == pytest.approx(1)
    assert float(weights.min()) == 0
    assert float(sigmas[weights.argmax()]) == pytest.approx(0.5, abs=3e-3)
    at, far = objective.weights(torch.tensor([0.5, 0.9], dtype=torch.float64), 1)
    bell = torch.exp(torch.tensor(-2 * (900 - 500) ** 2 / 1000**2)) - torch.exp(torch.tensor(-0.5))
    assert float(far / at) == pytest.approx(float(bell / (1 - torch.exp(torch.tensor(-0.5)))), rel=1e-5)


@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0])
def test_the_table_is_the_schedulers(shift):
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    objective = _built(model_id="wan_flow_match_scheduler", shift=shift)
    draws = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    torch.testing.assert_close(objective.sigmas(draws, 1).float(), scheduler.sigmas)
    noised = objective.noised(torch.zeros(1000, 1, 1, 1, 1), torch.ones(1000, 1, 1, 1, 1), draws, 1)
    torch.testing.assert_close(noised.timesteps, scheduler.timesteps)


@pytest.mark.parametrize("tokens", [256, 1024, 4096, 9000])
def test_a_shift_by_tokens_is_the_schedulers(tokens):
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    objective = _built(use_dynamic_shifting=True, sampling="uniform")
    scheduler = objective.sampling_scheduler()
    grid = [1.0, 0.8, 0.55, 0.3, 0.05]
    scheduler.set_timesteps(sigmas=grid, mu=calculate_shift(tokens))
    draws = 1 - torch.tensor(grid, dtype=torch.float64)
    torch.testing.assert_close(objective.sigmas(draws, tokens).float(), scheduler.sigmas[:-1])


def test_noise_is_put_on_as_the_scheduler_does_it():
    objective = _built(shift=3.0, sampling="uniform")
    scheduler = objective.sampling_scheduler()
    assert scheduler.config.shift == 3.0
    grid = [1.0, 0.6, 0.2]
    scheduler.set_timesteps(sigmas=grid)
    latents, noise = torch.randn(2, 3, 4, 2, 3, 3)
    noised = objective.noised(latents, noise, 1 - torch.tensor(grid, dtype=torch.float64), 1)
    torch.testing.assert_close(noised.noisy, scheduler.scale_noise(latents, scheduler.timesteps, noise))
    torch.testing.assert_close(noised.timesteps, scheduler.timesteps)
    torch.testing.assert_close(noised.target, noise - latents)
    assert noised.weights.tolist() == [1, 1, 1]
    # a whole step of a scheduler along the target leads from the noise to the data
    step = scheduler.step(noised.target[:1], scheduler.timesteps[0], noised.noisy[:1]).prev_sample
    torch.testing.assert_close(step, scheduler.scale_noise(latents[:1], scheduler.timesteps[1:2], noise[:1]))


def test_boundaries_share_the_table_between_two_experts():
    """Wan 2.2 of 14B: the expert of much noise answers for sigmas from 0.875, the other for those below."""
    table = {"model_id": "wan_flow_match_scheduler", "shift": 5.0}
    whole = _built(**table)
    assert float(whole._table(1)[417]) == pytest.approx(0.875, abs=1e-3)
    draws = torch.tensor([0.0, 0.3, 0.7, 1 - 2**-53], dtype=torch.float64)
    high = _built(**table, max_timestep_boundary=0.417).sigmas(draws, 1)
    low = _built(**table, min_timestep_boundary=0.417).sigmas(draws, 1)
    assert high.tolist() == sorted(high.tolist(), reverse=True) and float(high[0]) == 1
    assert 0.875 < float(high[-1]) < 0.8765
    assert 0.8745 < float(low[0]) <= 0.875 and float(low[-1]) < 0.006
    # every entry of the table belongs to one of them
    every = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    both = {
        round(float(sigma), 9)
        for keys in ({"max_timestep_boundary": 0.417}, {"min_timestep_boundary": 0.417})
        for sigma in _built(**table, **keys).sigmas(every, 1)
    }
    assert both == {round(float(sigma), 9) for sigma in whole._table(1)}


def test_boundaries_confine_every_density():
    for sampling in ("uniform", "logit_normal", "mode"):
        shares = _built(sampling=sampling, min_timestep_boundary=0.25, max_timestep_boundary=0.75).sigmas(EVEN, 1)
        assert 0.25 <= float(shares.min()) < 0.3 and 0.7 < float(shares.max()) <= 0.75


@pytest.mark.parametrize("sampling", ["uniform", "logit_normal", "mode"])
@pytest.mark.parametrize("weighting", ["uniform", "sigma_sqrt", "cosmap", "gaussian"])
def test_the_ends_of_draws_are_finite(sampling, weighting):
    objective = _built(sampling=sampling, weighting=weighting, shift=3.0)
    draws = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    noised = objective.noised(torch.zeros(2, 1, 1, 2, 2), torch.ones(2, 1, 1, 2, 2), draws, 4)
    for value in (noised.noisy, noised.target, noised.timesteps, noised.weights):
        assert bool(value.isfinite().all())
    assert all(0 <= timestep <= 1000 for timestep in noised.timesteps.tolist())


def test_what_model_json_leaves_out_is_the_familys():
    family = FamilyDefaults(shift=7.0, sampling="mode", weighting="cosmap")
    assert _built(family) == FlowMatching(shift=7.0, sampling="mode", weighting="cosmap")
    said = _built(family, shift=2.0, sampling="uniform", weighting="uniform", num_train_timesteps=500)
    assert said == FlowMatching(steps=500, shift=2.0)
    dynamic = FamilyDefaults(dynamic_shift=True)
    assert _built(dynamic).dynamic == (0.5, 1.15, 256, 4096)
    assert _built(dynamic, shift=3.0).dynamic is None
    assert _built(dynamic, shift=3.0).sampling_scheduler().config.shift == 3.0


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"model_id": "flow_match"}, r"'diffusion.model_id' is 'flow_match'; .*did you mean 'flow_matching'"),
        ({"min_timestep_boundary": 0.5, "max_timestep_boundary": 0.5}, r"0\.5 is not below .* no timestep is left"),
        ({"prediction_type": "epsilon"}, r"'epsilon', and flow matching predicts flow_prediction"),
        ({"model_id": "ddpm", "prediction_type": "flow_prediction"}, r"ddpm predicts epsilon, v_prediction or sample"),
    ],
)
def test_what_does_not_fit(keys, said):
    with pytest.raises(ConfigError, match=said):
        _built(**keys)
