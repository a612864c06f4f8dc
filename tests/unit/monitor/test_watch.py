"""What is counted over an interval of steps, whichever of them are logged."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.configs.flags.data_and_logging import LoggingArguments
from mindspeed_mm.configs.recipe import GeneratedFigures
from mindspeed_mm.data.loading.counting import BatchCounts
from mindspeed_mm.monitor.console.base import Console
from mindspeed_mm.monitor.console.full import FullConsole
from mindspeed_mm.monitor.metrics import MetricsSink, read_metrics
from mindspeed_mm.monitor.recording.lengths import LengthCounts
from mindspeed_mm.monitor.recording.recording import Recording
from mindspeed_mm.monitor.records import EvaluationRecord, StepRecord
from mindspeed_mm.monitor.row_log import RowLog
from mindspeed_mm.monitor.watch import Watch

NAN, INF = float("nan"), float("inf")


@dataclass
class Step:
    loss: float = 1.0
    skip_reason: str = ""


#: steps done before those of `lines`; the first ten of a run are logged whatever the interval
BEFORE = 120


def lines(folder: Path, steps: list[Step], interval: int, before: int = BEFORE) -> list[dict[str, Any]]:
    """The records of a run's last steps."""
    watch = Watch(
        sinks=[MetricsSink(str(folder), resumed=False)],
        console=FullConsole(),
        log_interval=interval,
        train_iters=before + len(steps),
        global_batch_size=4,
    )
    for number, step in enumerate(steps, before + 1):
        asked: list[Step] = []
        watch.add(number, BatchCounts(), lambda step=step, asked=asked: asked.append(step) or step)
        if watch.wants_result(number):
            figures = {
                "loss": step.loss,
                "grad_norm": 1.0,
                "learning_rate": 1e-3,
                "loss_scale": 2.0 ** (number - before),
            }
            watch.log_step(number, **figures, consumed_samples=0, consumed_tokens=0, metrics={})
        else:
            assert asked == []  # its figures may still be on the device
    watch.__exit__()
    return read_metrics(folder / "metrics.jsonl")


def test_figures_of_an_interval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rates over the interval, the longest wait of any rank, imbalance as its mean, rows left out over the run."""
    settings = {
        "sinks": [MetricsSink(str(tmp_path), resumed=False)],
        "console": FullConsole(),
        "train_iters": BEFORE + 4,
        "global_batch_size": 4,
    }
    watch = Watch(log_interval=2, row_log=RowLog(tmp_path, 0, 1, 0), **settings)
    for number in range(1, 5):
        iteration = BEFORE + number
        media = {"image": 3 * number, "video": 1}
        step = {"media": media, "row_ids": [number], "wait_seconds": 0.25, "flops": 8.0, "imbalance": 1.0 + number}
        counts = BatchCounts(tokens=75, positions=100, rows_left_out=number % 2, **step)
        watch.add(iteration, counts, Step)
        if watch.wants_result(iteration):
            watch._started = time.perf_counter() - 2.0  # the interval has taken two seconds
            figures = {"loss": 1.0, "grad_norm": 1.0, "learning_rate": 1e-3, "loss_scale": 1.0}
            watch.log_step(iteration, **figures, consumed_samples=0, consumed_tokens=0, metrics={})
    watch.__exit__()
    first, second = read_metrics(tmp_path / "metrics.jsonl")
    assert first["tokens_per_second"] == pytest.approx(75, rel=0.05)
    assert second["media_per_second"] == pytest.approx({"image": 10.5, "video": 1.0}, rel=0.05)
    assert (first["data_wait_ms"], first["padding_fraction"]) == (250.0, 0.25)
    assert first["data_wait_fraction"] == pytest.approx(0.25, rel=0.05)
    assert (first["imbalance"], second["imbalance"]) == (2.5, 4.5)
    assert (first["rows_left_out"], second["rows_left_out"]) == (1, 2)
    line = capsys.readouterr().out.splitlines()[1]
    assert "| data wait (ms): 250.0 | data wait: 25.0% | padding: 25.0% | imbalance: 4.50 | rows left out: 2 |" in line
    rows = (tmp_path / "rows" / "rank0.jsonl").read_text().splitlines()
    assert [json.loads(text)["rows"] for text in rows] == [[1], [2], [3], [4]]


@pytest.mark.parametrize(
    "interval, steps, logged",
    [
        (LoggingArguments().log_interval, 24, [*range(1, 11), 20, 24]),
        (100, 12, [*range(1, 11), 12]),
        (4, 13, [*range(1, 11), 12, 13]),
        (1, 12, [*range(1, 13)]),
    ],
    ids=["every tenth by default", "100", "4", "1"],
)
def test_the_first_ten_steps_and_the_last_are_logged_at_any_interval(
    tmp_path: Path, interval: int, steps: int, logged: list[int]
) -> None:
    """No figure of another step is read: `lines` asserts that."""
    assert [line["iteration"] for line in lines(tmp_path, [Step()] * steps, interval, before=0)] == logged


def test_figures_that_nobody_knows_are_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (record,) = lines(tmp_path, [Step()], 1)
    assert (record["imbalance"], record["media_per_second"]) == (None, {})
    printed = capsys.readouterr().out
    assert not any(name in printed for name in ("imbalance", "media per second", "rows left out"))


@pytest.mark.parametrize(
    "interval, skipped, nan",
    [(1, [0, 1, 1, 2, 3, 3], [0, 0, 0, 1, 2, 2]), (3, [1, 3], [0, 2]), (4, [2, 3], [1, 2]), (10, [3], [2])],
)
def test_steps_that_are_not_logged_count_too(tmp_path: Path, interval: int, skipped: list[int], nan: list[int]) -> None:
    """Overflowed gradients (the second step) are a skipped iteration; only a loss that is no number is a nan one."""
    bad = "not finite"
    steps = [Step(), Step(2.0, bad), Step(), Step(NAN, bad), Step(INF, bad), Step()]
    found = lines(tmp_path, steps, interval)
    assert [line["skipped_iterations"] for line in found] == skipped
    assert [line["nan_iterations"] for line in found] == nan


def test_a_step_without_targets_is_skipped_and_counted_by_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its loss is no number, as there was nothing to take a mean of; that is no nan iteration."""
    first, second = lines(tmp_path, [Step(), Step(NAN, "no targets")], 1)
    assert (second["skipped_iterations"], second["nan_iterations"], second["loss"]) == (1, 0, None)
    assert (first["iterations_without_targets"], second["iterations_without_targets"]) == (0, 1)
    before, after = capsys.readouterr().out.splitlines()
    assert "without targets" not in before and "| iterations without targets: 1 |" in after


def test_each_line_tells_the_scale_of_its_own_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = lines(tmp_path, [Step()] * 4, 2)
    assert [line["loss_scale"] for line in found] == [4.0, 16.0]
    printed = capsys.readouterr().out.splitlines()
    assert "| loss scale: 4.0 | grad norm:" in printed[0] and "| loss scale: 16.0 |" in printed[1]


def test_scores_of_answers_are_beside_the_validation_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the log, metrics.jsonl and the answers' file; an earlier file of another run is set aside."""
    (tmp_path / "eval_answers.jsonl").write_text('{"iteration": 9}\n')
    sinks = [MetricsSink(str(tmp_path), resumed=False)]
    watch = Watch(sinks=sinks, console=FullConsole(), log_interval=1, train_iters=9, global_batch_size=1)
    watch.log_evaluation(EvaluationRecord(2, 5, 1.5))
    samples = [{"index": 0, "prompt": "p", "answer": "a", "reference": "b"}]
    watch.log_evaluation(EvaluationRecord(4, 5, 1.25, GeneratedFigures({"wer": 50.0}, 7, samples)))
    watch.log_evaluation(EvaluationRecord(6, 5, 1.0, GeneratedFigures({"wer": NAN}, 7)))
    watch.__exit__()
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"iteration": 2, "eval_loss": 1.5, "eval_batches": 5},
        {"iteration": 4, "eval_loss": 1.25, "eval_batches": 5, "eval_wer": 50.0, "eval_rows": 7},
        {"iteration": 6, "eval_loss": 1.0, "eval_batches": 5, "eval_wer": None, "eval_rows": 7},
    ]
    assert read_metrics(tmp_path / "eval_answers.jsonl") == [{"iteration": 4, **samples[0]}]
    assert (tmp_path / "eval_answers.1.jsonl").read_text() == '{"iteration": 9}\n'
    assert "loss: 1.250000E+00 | wer: 5.000000E+01 | rows answered: 7 |\n" in capsys.readouterr().out


class Recorder(Console):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def step(self, record: StepRecord) -> None:
        self.told.append(record.step_ms)

    def work(self, name: str | None) -> None:
        self.told.append(name)

    def close(self) -> None:
        self.told.append("closed")


def test_work_between_steps_is_timed_by_itself_and_an_error_closes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    console = Recorder()
    watch = Watch(sinks=[], console=console, log_interval=1, train_iters=9, global_batch_size=1)
    with pytest.raises(ZeroDivisionError), watch:
        for number, work in ((1, "evaluation"), (2, "saving"), (3, "evaluation")):
            watch.add(number, BatchCounts(), Step)
            now[0] += 2.0
            with watch.paused(work):
                now[0] += 30.0
            figures = {"loss": 1.0, "grad_norm": 1.0, "learning_rate": 1e-3, "loss_scale": 1.0}
            watch.log_step(number, **figures, consumed_samples=0, consumed_tokens=0, metrics={})
        _ = 1 / 0
    assert watch.seconds == {"evaluation": 60.0, "saving": 30.0}
    assert console.told == ["evaluation", None, 2000.0, "saving", None, 2000.0, "evaluation", None, 2000.0, "closed"]


def test_what_is_recorded_is_finished_before_sinks_that_show_it(tmp_path: Path) -> None:
    seen: list[bool] = []

    class Shows(MetricsSink):
        def close(self) -> None:
            seen.append((tmp_path / "report" / "lengths.json").exists())
            super().close()

    recording = Recording(tmp_path / "report", 0, 1, LengthCounts(tmp_path / "report", 0, capacity=None))
    watch = Watch(
        sinks=[Shows(str(tmp_path), resumed=False)],
        console=Console(),
        log_interval=1,
        train_iters=1,
        global_batch_size=1,
        recording=recording,
    )
    with watch:
        watch.add(1, BatchCounts(lengths=[3]), Step)
    recording.close()
    assert seen == [True]
