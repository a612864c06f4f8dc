"""What is counted over an interval of steps, whichever of them are logged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.data.counting import BatchCounts
from mindspeed_mm.monitor.metrics import read_metrics
from mindspeed_mm.monitor.watch import Watch

NAN, INF = float("nan"), float("inf")


@dataclass
class Step:
    loss: float = 1.0
    skipped: bool = False


def lines(folder: Path, steps: list[Step], interval: int) -> list[dict[str, Any]]:
    """The records of a run."""
    watch = Watch(
        is_writer=True,
        save=str(folder),
        resumed=False,
        log_interval=interval,
        train_iters=len(steps),
        global_batch_size=4,
    )
    for number, step in enumerate(steps, 1):
        asked: list[Step] = []
        watch.add(BatchCounts(), None, lambda step=step, asked=asked: asked.append(step) or step)
        if watch.wants_result(number):
            figures = {"loss": step.loss, "grad_norm": 1.0, "learning_rate": 1e-3, "loss_scale": 2.0**number}
            watch.log_step(number, **figures, consumed_samples=0, consumed_tokens=0, metrics={})
        else:
            assert asked == []  # its figures may still be on the device
    watch.close()
    return read_metrics(folder / "metrics.jsonl")


@pytest.mark.parametrize(
    "interval, skipped, nan",
    [(1, [0, 1, 1, 2, 3, 3], [0, 0, 0, 1, 2, 2]), (3, [1, 3], [0, 2]), (4, [2, 3], [1, 2]), (10, [3], [2])],
)
def test_steps_that_are_not_logged_count_too(tmp_path: Path, interval: int, skipped: list[int], nan: list[int]) -> None:
    """Overflowed gradients (the second step) are a skipped iteration; only a loss that is no number is a nan one."""
    steps = [Step(), Step(2.0, True), Step(), Step(NAN, True), Step(INF, True), Step()]
    found = lines(tmp_path, steps, interval)
    assert [line["skipped_iterations"] for line in found] == skipped
    assert [line["nan_iterations"] for line in found] == nan


def test_each_line_tells_the_scale_of_its_own_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = lines(tmp_path, [Step()] * 4, 2)
    assert [line["loss_scale"] for line in found] == [4.0, 16.0]
    printed = capsys.readouterr().out.splitlines()
    assert "| loss scale: 4.0 | grad norm:" in printed[0] and "| loss scale: 16.0 |" in printed[1]
