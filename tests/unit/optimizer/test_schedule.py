"""Schedules against their formulas, at the points where they turn."""

from __future__ import annotations

import math

import pytest

from mindspeed_mm.optimizer.schedule import ScheduleOptions
from mindspeed_mm.utils.errors import ConfigError


def lrs(steps: list[float], **options: object) -> list[float]:
    schedule = ScheduleOptions(max_lr=1.0, **{"decay_steps": 100, **options})  # type: ignore[arg-type]
    return [schedule.lr(s) for s in steps]


def test_constant_with_warmup() -> None:
    assert lrs([0, 5, 10, 11, 500], warmup_steps=10) == [0.0, 0.5, 1.0, 1.0, 1.0]


def test_warmup_starts_at_its_init() -> None:
    assert lrs([0, 5], warmup_steps=10, warmup_init_lr=0.2) == pytest.approx([0.2, 0.6])


def test_linear_ends_at_min() -> None:
    assert lrs([0, 50, 100, 101], decay_style="linear", min_lr=0.1) == pytest.approx([1.0, 0.55, 0.1, 0.1])


def test_cosine() -> None:
    expected = [0.5 * (1 + math.cos(math.pi * x)) for x in (0, 0.25, 1)]
    assert lrs([20, 40, 100], decay_style="cosine", warmup_steps=20) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("shape", "middle"),
    [("linear", 0.5), ("cosine", 0.5), ("exponential", 2 * 0.5**0.5 - 1), ("minus_sqrt", 1 - 0.5**0.5)],
)
def test_wsd_is_stable_then_decays(shape: str, middle: float) -> None:
    found = lrs([80, 90, 100], decay_style="WSD", wsd_decay_steps=20, wsd_decay_style=shape)
    assert found == pytest.approx([1.0, middle, 0.0], abs=1e-12)


def test_inverse_square_root() -> None:
    assert lrs([16, 64], decay_style="inverse-square-root", warmup_steps=4) == pytest.approx([0.5, 0.25])


def test_weight_decay_grows_as_asked() -> None:
    options = ScheduleOptions(
        max_lr=1.0, decay_steps=10, start_weight_decay=0.0, end_weight_decay=1.0, weight_decay_style="linear"
    )
    assert [options.weight_decay(s) for s in (0, 5, 10, 20)] == [0.0, 0.5, 1.0, 1.0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"min_lr": 2.0}, "--min-lr is 2.0"),
        ({"warmup_steps": 100}, "warmup takes 100 iterations, but decay ends at 100"),
        ({"warmup_init_lr": 3.0}, "--lr-warmup-init is 3.0"),
    ],
)
def test_impossible_schedules_are_refused(options: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ScheduleOptions(max_lr=1.0, decay_steps=100, **options)
