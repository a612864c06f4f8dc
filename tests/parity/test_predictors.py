"""Every predictor family against a plain diffusers training loss: the same weights, noise, timesteps and batches."""

from __future__ import annotations

import pytest
import torch

from tests.support.predictors import cases

CASES = cases()


def _ours(name, case):
    from mindspeed_mm.models.generation.sora_model import SoRAModel

    return SoRAModel(case.model_json(name))


def _theirs(model, case):
    import diffusers

    plain = getattr(diffusers, model.family.model_class_name)(**case.config)
    plain.load_state_dict(model.predictor.state_dict())
    return plain.train()


@pytest.mark.parametrize("label", CASES)
def test_loss_and_gradients_equal_a_plain_diffusers_loss(label):
    name, case = CASES[label]
    model = _ours(name, case)
    plain = _theirs(model, case)
    for epoch in range(2):
        batch = model.prepare(case.batch([0, 1, 2], epoch))
        output = model(**batch)
        (output["loss"] / output["denominator"]).backward()
        inputs = {k: batch[k] for k in ("latents", "noise", "draws", "text", "conditions")}
        expected = case.plain(plain, **inputs)
        expected.backward()
        assert float(output["denominator"]) == 3
        torch.testing.assert_close(output["loss"] / 3, expected, rtol=1e-5, atol=1e-7)
    ours = dict(model.predictor.named_parameters())
    for key, parameter in plain.named_parameters():
        got, wanted = ours[key].grad, parameter.grad
        assert (got is None) == (wanted is None), key
        if wanted is not None:
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("label", CASES)
def test_recompute_leaves_gradients_as_they_are(label):
    name, case = CASES[label]
    gradients = []
    for recompute in (False, True):
        model = _ours(name, case)
        if recompute:
            from mindspeed_mm.models.generation.sora_model import block_paths

            model.predictor.set_recompute_modules_to_wrap(
                recompute_modules=block_paths(model.predictor), use_reentrant=False
            )
        model(**model.prepare(case.batch([0, 1])))["loss"].backward()
        gradients.append([p.grad for p in model.predictor.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(recomputed, plain, rtol=0, atol=0)


@pytest.mark.parametrize("label", CASES)
def test_a_batch_is_the_mean_of_its_samples(label):
    name, case = CASES[label]
    model = _ours(name, case)
    together = model(**model.prepare(case.batch([0, 1, 2, 3])))
    apart = [model(**model.prepare(case.batch([row])))["loss"] for row in (3, 1, 0, 2)]
    torch.testing.assert_close(together["loss"], sum(apart), rtol=1e-5, atol=1e-7)
