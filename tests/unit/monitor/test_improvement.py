"""Which evaluations are improvements, and when --early-stop ends a run."""

from __future__ import annotations

import json
from unittest import mock

import pytest

from mindspeed_mm.checkpoint.best import BestCheckpoint
from mindspeed_mm.configs.eval_metrics import EVAL_METRICS, EvalMetric, improves
from mindspeed_mm.monitor.endings import nothing_is_left, stopped_early
from mindspeed_mm.monitor.improvement import Improvement, refuse_without_validation
from mindspeed_mm.progress import Progress
from mindspeed_mm.utils.errors import ConfigError
from tests.support.runs import run_of

NAN, INF = float("nan"), float("inf")


def followed(values: list[float], start: Improvement | None = None) -> Improvement:
    """The state after evaluations at iterations 10, 20, …"""
    improvement = start or Improvement()
    for number, value in enumerate(values, 1):
        improvement = improvement.after(10 * number, {"loss": value})
    return improvement


@pytest.mark.parametrize(
    ("values", "best", "since"),
    [
        ([], None, 0),
        ([3.0], (10, 3.0), 0),
        ([3.0, 2.0, 2.0, 2.5], (20, 2.0), 2),  # a tie is no improvement
        ([3.0, NAN, 2.0, NAN], (30, 2.0), 1),
        ([NAN, INF, -INF], None, 3),
        ([NAN, 3.0], (20, 3.0), 0),
        ([0.0, -0.0, -1.0], (30, -1.0), 0),
    ],
)
def test_what_is_an_improvement(values: list[float], best: tuple[int, float] | None, since: int) -> None:
    found = followed(values)
    assert found.checkpoint == (None if best is None else BestCheckpoint(best[0], "loss", best[1]))
    assert found.since == since
    assert [found.ends(limit) for limit in (None, since, since + 1)] == [False, True, False]
    assert found.ends(since + 1, worse=1)


def test_of_some_figures_the_higher_value_is_better() -> None:
    with mock.patch.dict(EVAL_METRICS, {"loss": EvalMetric("accuracy", higher_is_better=True)}):  # type: ignore[dict-item]
        assert followed([1.0, 3.0, 3.0, 2.0]).checkpoint == BestCheckpoint(20, "loss", 3.0)
        assert not improves("loss", INF, 1.0) and improves("loss", 2.0, 1.0)
        assert BestCheckpoint(1, "loss", 2.0).beats(BestCheckpoint(1, "loss", 1.0))


def test_a_resumed_run_decides_as_the_unbroken_one() -> None:
    run, values = run_of(early_stop=3, eval_interval=10), [3.0, 1.0, NAN, 2.0, 1.0]
    begun = Improvement.of(run, None)
    assert begun == Improvement() and begun is not None
    for stop in range(len(values) + 1):
        saved = json.loads(json.dumps(followed(values[:stop]).state))
        resumed = Improvement.of(run, saved)
        assert resumed == followed(values[:stop])
    assert followed(values).ends(3) and not followed(values[:-1]).ends(3)


def test_older_checkpoints_and_those_of_another_figure_begin_anew(caplog: pytest.LogCaptureFixture) -> None:
    run = run_of(save_best="loss", save="run")
    assert Improvement.of(run, None) == Improvement()
    assert not caplog.messages
    assert Improvement.of(run, {"metric": "wer", "value": 1.0, "iteration": 3, "since": 1}) == Improvement()
    assert "the checkpoint follows wer, and this run loss" in caplog.text
    assert Improvement.of(run_of(), followed([1.0]).state) is None  # nothing is followed


def test_when_a_run_is_over() -> None:
    run = run_of(train_iters=100, early_stop=2)
    progress = Progress(iteration=30, improvement=followed([1.0, 2.0]))
    assert not progress.is_over(run) and progress.stopped_early(run, worse=1)
    progress.improvement = followed([1.0, 2.0, 2.0])
    assert progress.is_over(run) and progress.stopped_early(run)
    assert not progress.is_over(run_of(train_iters=100)) and progress.is_over(run_of(train_iters=30))


def test_what_is_told() -> None:
    run = run_of(train_iters=100, early_stop=2, load="run")
    assert stopped_early(followed([1.0, 2.0, 2.0]), 30, run) == (
        "--early-stop 2: 2 evaluations in a row have not improved the validation loss, whose best is 1.000000E+00 at "
        "iteration 10; training ends after iteration 30 of 100"
    )
    assert "which was never finite" in stopped_early(followed([NAN, NAN]), 20, run)
    left = nothing_is_left(run, 30, None, followed([1.0, 2.0, 2.0]))
    assert left.startswith("nothing is left to train: --early-stop 2: 2 eval")
    assert left.endswith("raise --early-stop or leave it out to train on")
    assert "--train-iters 100 counts" in nothing_is_left(run, 100, None, followed([1.0, 2.0, 2.0]))


def test_data_of_a_script_without_validation() -> None:
    refuse_without_validation(run_of())
    with pytest.raises(ConfigError, match="--early-stop 2 needs validation data, and train_valid_test_datasets_prov"):
        refuse_without_validation(run_of(early_stop=2))
