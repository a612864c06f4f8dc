"""The factor of the backward pass: the loss scale over a power of two next to the step's divisor."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from mindspeed_mm.optimizer.backward_factor import BackwardFactor
from mindspeed_mm.optimizer.loss_scale import DynamicLossScale, LossScale
from mindspeed_mm.parallel.world import RankSet
from mindspeed_mm.utils import log

YES, NO = torch.tensor(True), torch.tensor(False)


def number(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def started(loss_scale: LossScale, denominator: float = 100.0, micro_batches: int = 1) -> BackwardFactor:
    factor = BackwardFactor(loss_scale, estimates=True)
    factor.begin(micro_batches)
    factor.observe(number(denominator), is_mean=False)
    return factor


def test_the_first_step_goes_by_its_first_micro_batch() -> None:
    factor = started(LossScale(4096.0), 100.0, micro_batches=4)  # 400 is next to 512
    assert float(factor.current()) == 8.0
    factor.observe(number(5000.0), is_mean=False)  # a later micro-batch of the step changes nothing
    assert float(factor.current()) == 8.0
    assert float(factor.apply(torch.tensor(3.0))) == 24.0
    assert float(started(LossScale(4096.0), 0.0, micro_batches=4).current()) == 4096.0


def test_each_step_goes_by_the_one_before() -> None:
    factor = started(LossScale(4096.0))
    for divisor, has_targets, expected in [
        (1100.0, YES, 4.0),  # 1024
        (1e-30, NO, 4.0),  # nothing to train on
        (float("nan"), YES, 4.0),
        (float("inf"), YES, 4.0),
        (0.25, YES, 16384.0),
    ]:
        factor.update(number(divisor), has_targets)
        assert float(factor.current()) == expected


def test_the_divisor_of_means_is_known() -> None:
    factor = BackwardFactor(LossScale(64.0), estimates=True)
    factor.begin(8)
    factor.observe(number(1.0), is_mean=True)
    assert float(factor.current()) == 8.0


def test_gradients_made_in_the_forward_pass_know_about_what_comes() -> None:
    factor = BackwardFactor(LossScale(4096.0), estimates=True, ranks=RankSet(0, 2, group=mock.sentinel.group))
    factor.begin(4)
    assert factor.expected(128) == 4.0  # the first step: as if all micro-batches were like this one
    factor._ranks = 1
    factor.observe(number(1024.0), is_mean=False)
    assert float(factor.expected(128)) == float(factor.current()) == 1.0
    factor.observe(number(1.0), is_mean=True)  # a mean: the sum is divided by the micro-batch's targets too
    assert factor.expected(128) == 8.0


def test_other_precisions_are_left_alone() -> None:
    factor = BackwardFactor(LossScale(), estimates=False)
    loss = torch.tensor(3.0)
    factor.observe(number(1024.0), is_mean=False)
    factor.update(number(1024.0), YES)
    assert factor.current() == 1.0 and factor.apply(loss) is loss
    assert factor.is_agreed and factor.state_dict() == {}


def test_ranks_without_a_loss_are_told() -> None:
    factor = BackwardFactor(LossScale(4096.0), estimates=True)
    assert not factor.is_agreed
    factor.agree(lambda own: [own, 512.0])
    assert factor.is_agreed and factor.current() == 8.0


def test_a_resumed_run_goes_on_with_the_same_factor() -> None:
    factor = started(DynamicLossScale(4096.0))
    factor.update(number(1100.0), YES)
    state = factor.state_dict()
    assert state == {"scale": 4096.0, "growth_tracker": 0, "hysteresis_tracker": 2, "divisor": 1024.0}
    resumed = BackwardFactor(DynamicLossScale(1.0), estimates=True)
    resumed.load_state_dict(state)
    assert resumed.is_agreed and resumed.current() == float(factor.current()) == 4.0


def test_a_scale_of_sums_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(log.logger, "warning", said.append)
    scale = DynamicLossScale(4096.0)
    factor = BackwardFactor(scale, estimates=True)
    factor.load_state_dict({"scale": 2.0, "growth_tracker": 0, "hysteresis_tracker": 2})
    assert scale.scale == 4096.0 and not factor.is_agreed
    assert len(said) == 1 and "begins anew" in said[0]


def test_a_fixed_scale_leaves_no_dynamic_one_to_go_on_with() -> None:
    state = started(LossScale(4096.0)).state_dict()
    assert state == {"divisor": 128.0}
    for estimates, expected in ((True, 2.0), (False, 256.0)):
        scale = DynamicLossScale(256.0)
        resumed = BackwardFactor(scale, estimates=estimates)
        resumed.load_state_dict(state)
        assert scale.scale == 256.0 and resumed.current() == expected
