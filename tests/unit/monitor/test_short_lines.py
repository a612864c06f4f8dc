"""Lines for people: their words, how many a run has, and for whom they are."""

from __future__ import annotations

import dataclasses
import io
import itertools
from typing import Any

import pytest

from mindspeed_mm.configs.environment import STARTER
from mindspeed_mm.configs.recipe import GeneratedFigures
from mindspeed_mm.monitor.console import words
from mindspeed_mm.monitor.console.base import Console
from mindspeed_mm.monitor.console.choice import form_of, open_console
from mindspeed_mm.monitor.console.full import FullConsole
from mindspeed_mm.monitor.console.short import SILENCE, ShortConsole, short_evaluation, short_step
from mindspeed_mm.monitor.records import EvaluationRecord
from mindspeed_mm.monitor.watch import FIRST_STEPS
from mindspeed_mm.utils.launch import Launch
from tests.support.records import step_record
from tests.support.runs import run_of

#: a step where all is well, late in a long run on large devices
WELL = {
    "iteration": 123_450,
    "train_iters": 200_000,
    "loss": 1.23456,
    "learning_rate": 9.8e-4,
    "tokens_per_second": 812_345.0,
    "mfu": 0.4127,
    "memory_bytes": int(131.25 * 2**30),
    "skipped_iterations": 0,
    "rows_left_out": 0,
    "eta_seconds": 94_000.0,
}


def test_the_line_of_a_step() -> None:
    line = short_step(step_record(**WELL))
    assert line == (
        "123450/200000   61 %  loss 1.2346  norm 1.25  lr 9.80e-04  812k tokens/s  1.23 s/step  MFU 41 %  131.2 GiB  "
        "ETA 1d02h"
    )
    assert len(line) <= 120


def test_what_is_wrong_is_told_and_nothing_else() -> None:
    record = step_record(data_wait_fraction=0.123, nan_iterations=2, mfu=None, memory_bytes=None, loss_scale=2.0)
    assert short_step(record) == (
        "  7/100    7 %  loss 2.5000  norm 1.25  lr 1.00e-05  1.00k tokens/s  1.23 s/step  data wait 12 %  skipped 1  "
        "NaN 2  rows left out 3  ETA 1h01m"
    )
    assert "data wait" not in short_step(step_record(data_wait_fraction=0.049))


def test_samples_stand_for_tokens_and_further_figures_follow_the_loss() -> None:
    """As of a generation model; the last step has no time to go."""
    in_tokens = step_record(**WELL)
    assert "812k tokens/s" in short_step(in_tokens) and "25.9 samples/s" in short_step(in_tokens, in_samples=True)
    metrics = {"z": 0.000123, "accuracy": 0.8765}
    figures = {"iteration": 100, "tokens_per_second": None, "step_ms": 640.0, "metrics": metrics, "loss": 1e-5}
    line = short_step(step_record(**figures, skipped_iterations=0, rows_left_out=0))
    assert line == (
        "100/100  100 %  loss 1.000e-05  accuracy 0.876  z 1.23e-04  norm 1.25  lr 1.00e-05  50 samples/s  "
        "640 ms/step  1.00 GiB"
    )


def test_the_line_of_an_evaluation() -> None:
    generated = GeneratedFigures({"exact_match": 97.5}, 360)
    assert short_evaluation(EvaluationRecord(40, 5, 0.51234), 500) == " 40/500    8 %  evaluation  loss 0.5123"
    assert short_evaluation(EvaluationRecord(40, 5, float("nan"), generated), 500) == (
        " 40/500    8 %  evaluation  loss nan  exact_match 97.5  360 answers"
    )


@pytest.mark.parametrize(
    "function, expected",
    [
        (
            words.amount,
            {0: "0", 7: "7", 980.4: "980", 999.7: "1.00k", 12_345: "12.3k", 7.616e9: "7.62B", 0.25: "0.250"},
        ),
        (words.duration, {0.4: "0s", 59.6: "1m00s", 725: "12m05s", 3725: "1h02m", 273_600: "3d04h"}),
        (words.step_time, {8.44: "8.44 ms", 145.2: "145 ms", 999.6: "1.00 s", 99_960: "1m40s"}),
        (words.gibibytes, {2**29: "0.50 GiB", 141 * 2**30: "141.0 GiB"}),
        (words.per_cent, {0.0: "0 %", 0.004: "0.4 %", 0.0996: "10 %", 0.41: "41 %"}),
        (words.figure, {0.0: "0", float("inf"): "inf", 12.345: "12.3", 99_999.0: "1.00e+05", -0.5: "-0.500"}),
    ],
)
def test_figures_in_words(function: Any, expected: dict[float, str]) -> None:
    assert {value: function(value) for value in expected} == expected


class Clock:
    """A clock that stands still until it is told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def told(
    capsys: pytest.CaptureFixture[str], steps: int, seconds: float, interval: int, begin: int = 0, **how: bool
) -> list[int]:
    """The steps after `begin` whose lines a run prints, in which each step takes so many seconds."""
    clock = Clock()
    console = ShortConsole(steps, clock=clock, **how)
    for number in range(begin + 1, steps + 1):
        clock.now += seconds  # a rank asks once it has done the step's forward and backward
        is_logged = console.is_overdue() or number <= FIRST_STEPS or number % interval == 0 or number == steps
        if is_logged:
            console.step(step_record(iteration=number, train_iters=steps))
    return [int(line.partition("/")[0]) for line in capsys.readouterr().out.splitlines()]


def test_a_short_run_has_lines_as_many_as_one_reads(capsys: pytest.CaptureFixture[str]) -> None:
    """The quick start's 500 steps, by default and with --log-interval 10."""
    assert told(capsys, 500, 0.2, 10) == [1, 2, 5, 10, *range(20, 501, 20)]
    assert told(capsys, 500, 0.2, 10, begin=443) == [444, 460, 480, 500]  # a run that goes on shows its first step
    assert told(capsys, 500, 0.2, 10, shows_all=True) == [*range(1, 11), *range(20, 501, 10)]


def test_the_quick_start_has_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Its 500 steps of 0.2 s with an evaluation after each hundred, between the longest header and summary; besides
    them it has some 15 messages."""
    console = ShortConsole(500)
    console.begin(lambda: ["header"] * 12)
    for number in [*range(1, FIRST_STEPS), *range(10, 501, 10)]:
        console.step(step_record(iteration=number, train_iters=500))
        if number % 100 == 0:
            console.evaluation(EvaluationRecord(number, 5, 1.0))
    console.finish(lambda: ["summary"] * 8)
    assert len(capsys.readouterr().out.splitlines()) == 12 + 29 + 5 + 8 <= 80 - 15


def test_slow_steps_are_never_silent_for_long(capsys: pytest.CaptureFixture[str]) -> None:
    """Of steps of 12 s, each that ends 30 s after a line; of those that take longer, each."""
    numbers = told(capsys, 2000, 12.0, 10)
    gaps = [(after - before) * 12.0 for before, after in itertools.pairwise(numbers)]
    assert max(gaps) <= SILENCE + 12.0 and len(numbers) > 500
    assert told(capsys, 30, 40.0, 10) == [*range(1, 31)]
    assert told(capsys, 30, 40.0, 10, shows_all=True) == [*range(1, 11), 20, 30]


STARTED = {STARTER: "mindspeed-mm train", "TERM": "xterm"}


@pytest.mark.parametrize(
    "wanted, is_terminal, environment, form",
    [
        ("auto", True, {"TERM": "xterm"}, "full"),  # torchrun, or a launch script of bash
        ("auto", False, {}, "full"),
        ("auto", True, STARTED, "live"),
        ("auto", False, STARTED, "short"),
        ("auto", True, {**STARTED, "TERM": "dumb"}, "short"),
        ("auto", True, {**STARTED, "CI": "true"}, "short"),
        ("auto", True, {**STARTED, "PYTHONIOENCODING": "latin-1"}, "short"),
        ("live", True, {"TERM": "xterm"}, "live"),
        ("live", False, {"TERM": "xterm"}, "short"),
        ("short", True, STARTED, "short"),
        ("full", True, STARTED, "full"),
    ],
)
def test_who_gets_which_lines(wanted: str, is_terminal: bool, environment: dict[str, str], form: str) -> None:
    class Output(io.StringIO):
        encoding = environment.get("PYTHONIOENCODING", "UTF-8")

        def isatty(self) -> bool:
            return is_terminal

    assert form_of(wanted, Output(), environment) == form


def test_which_rank_shows_what(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one the published lines, the first one all others; a terminal that isn't there is said."""
    monkeypatch.delenv(STARTER, raising=False)

    def consoles(**flags: str) -> list[type[Console]]:
        run = run_of(world_size=2, **flags)
        ranks = [dataclasses.replace(run, launch=Launch(rank=rank, world_size=2)) for rank in range(2)]
        return [type(open_console(run, is_logging_rank=rank == 1)) for rank, run in enumerate(ranks)]

    assert consoles() == [Console, FullConsole]
    monkeypatch.setenv(STARTER, "mindspeed-mm train")
    assert consoles(log_format="full") == [Console, FullConsole]
    assert consoles() == [ShortConsole, Console] and said == []
    assert consoles(log_format="live") == [ShortConsole, Console]
    (sentence,) = said
    assert sentence.startswith("--log-format live needs a terminal that writes UTF-8 (and neither TERM=dumb nor CI); ")
