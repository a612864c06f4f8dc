"""The loss scale against sequences worked out by hand, and which one a run gets."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mindspeed_mm.configs.flags.model import PrecisionArguments
from mindspeed_mm.optimizer.loss_scale import DynamicLossScale, LossScale, build_loss_scale
from mindspeed_mm.utils import log


def scales(outcomes: str, loss_scale: LossScale) -> list[float]:
    """The scale after each step; `x` is a step that overflowed, `.` one that didn't."""
    found = []
    for outcome in outcomes:
        loss_scale.update(overflowed=outcome == "x")
        found.append(loss_scale.scale)
    return found


def precision(**flags: Any) -> PrecisionArguments:
    return PrecisionArguments(**flags)


@pytest.mark.parametrize(
    "outcomes, options, expected",
    [
        # the first overflow is forgiven, every later one halves
        ("xxxx", {}, [16, 8, 4, 2]),
        ("xxxx", {"hysteresis": 1}, [8, 4, 2, 1]),
        ("xxxx", {"hysteresis": 3}, [16, 16, 8, 4]),
        # overflows need not follow each other: finite steps forgive nothing
        ("x.x.x", {}, [16, 16, 8, 8, 4]),
        # never below the minimum
        ("xxxx", {"minimum": 3}, [16, 8, 4, 3]),
        # a window of finite steps doubles, and the next window again
        ("...", {"window": 1}, [32, 64, 128]),
        ("......", {"window": 3}, [16, 16, 32, 32, 32, 64]),
        ("..", {"window": 1.5}, [16, 32]),
        # an overflow starts the window anew, even one that is forgiven
        ("..x..", {"window": 3}, [16, 16, 16, 16, 16]),
        ("..x...", {"window": 3}, [16, 16, 16, 16, 16, 32]),
        # after a doubling as many are forgiven as at the start; without one none is
        ("xx..x", {"window": 3}, [16, 8, 8, 8, 4]),
        ("xx...xx", {"window": 3}, [16, 8, 8, 8, 16, 16, 8]),
    ],
)
def test_sequences(outcomes: str, options: dict[str, Any], expected: list[float]) -> None:
    assert scales(outcomes, DynamicLossScale(16.0, **options)) == expected


def test_a_fixed_scale_stays() -> None:
    fixed = LossScale(1024.0)
    assert scales("xx...x", fixed) == [1024.0] * 6
    assert not fixed.is_dynamic and fixed.state_dict() == {}
    fixed.load_state_dict({"scale": 2.0, "growth_tracker": 0, "hysteresis_tracker": 1})
    assert fixed.scale == 1024.0  # the flags say it


@pytest.mark.parametrize("cut", range(12))
def test_it_goes_on_from_its_state(cut: int) -> None:
    outcomes, options = "xx..x...xx..", {"window": 3}
    whole = scales(outcomes, DynamicLossScale(16.0, **options))
    before, after = DynamicLossScale(16.0, **options), DynamicLossScale(2.0**32, **options)
    scales(outcomes[:cut], before)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert scales(outcomes[cut:], after) == whole[cut:]


def test_a_checkpoint_without_a_state_starts_anew() -> None:
    fresh = DynamicLossScale(16.0)
    fresh.load_state_dict({})
    assert fresh.state_dict() == {"scale": 16.0, "growth_tracker": 0, "hysteresis_tracker": 2}


def test_the_flags_of_a_resumed_run_limit_the_state() -> None:
    """Another minimum, window and hysteresis than those that the state was saved with."""
    state = {"scale": 2.0, "growth_tracker": 50, "hysteresis_tracker": 5}
    resumed = DynamicLossScale(64.0, minimum=8.0, window=10, hysteresis=1)
    resumed.load_state_dict(state)
    assert scales(".x", resumed) == [16.0, 8.0]


def test_overflow_at_the_minimum_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(log.logger, "warning", said.append)
    loss_scale = DynamicLossScale(4.0, minimum=2.0, hysteresis=1)
    assert scales("x", loss_scale) == [2.0] and said == []  # only now is it at the minimum
    assert scales("xx", loss_scale) == [2.0, 2.0]
    assert len(said) == 1 and "--min-loss-scale" in said[0] and "(2," in said[0]


def test_what_a_run_gets() -> None:
    assert build_loss_scale(precision(), "fp32").scale == 1.0
    assert build_loss_scale(precision(loss_scale=8.0), "bf16").scale == 1.0
    fixed = build_loss_scale(precision(loss_scale=8.0), "fp16")
    assert fixed.scale == 8.0 and not fixed.is_dynamic
    dynamic = build_loss_scale(precision(), "fp16")
    assert dynamic.scale == 2.0**32 and dynamic.is_dynamic
    assert scales("x" * 40, dynamic)[-1] == 1.0
    flags = {"initial_loss_scale": 64.0, "min_loss_scale": 16.0, "loss_scale_window": 2, "hysteresis": 1}
    assert scales("xxx....", build_loss_scale(precision(**flags), "fp16")) == [32, 16, 16, 16, 32, 32, 64]


@pytest.mark.parametrize(
    "dtype, flags, starts",
    [
        ("bf16", {}, []),
        ("fp16", {"initial_loss_scale": 64.0, "hysteresis": 1}, []),
        ("fp16", {"loss_scale": 64.0}, []),
        ("bf16", {"loss_scale": 64.0}, ["--loss-scale has no effect here: only fp16"]),
        ("fp32", {"hysteresis": 1}, ["--hysteresis has no effect here: only fp16"]),
        (
            "fp16",
            {"loss_scale": 64.0, "initial_loss_scale": 4.0, "loss_scale_window": 2},
            ["--initial-loss-scale has no effect here: --loss-scale", "--loss-scale-window has no effect here"],
        ),
    ],
)
def test_flags_without_effect_are_said(
    monkeypatch: pytest.MonkeyPatch, dtype: str, flags: dict[str, Any], starts: list[str]
) -> None:
    said: list[str] = []
    monkeypatch.setattr(log.logger, "warning", said.append)
    build_loss_scale(precision(**flags), dtype)
    assert len(said) == len(starts)
    assert all(line.startswith(start) for line, start in zip(said, starts, strict=True))
