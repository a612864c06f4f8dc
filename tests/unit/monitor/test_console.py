"""The log line keeps the shape that published scripts parse."""

from __future__ import annotations

import re

import pytest

from mindspeed_mm.monitor.console.full import FullConsole, format_evaluation, format_step
from mindspeed_mm.monitor.records import EvaluationRecord
from tests.support.records import step_record


def test_the_published_fields_come_first_in_their_order() -> None:
    line = format_step(step_record())
    assert re.match(
        r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] iteration +7/ +100 \| consumed samples: +224 \| "
        r"elapsed time per iteration \(ms\): 1234\.6 \| learning rate: 1\.000000E-05 \| global batch size: +32 \| "
        r"loss: 2\.500000E\+00 \| grad norm: 1\.250 \| number of skipped iterations: +1 \| number of nan iterations: "
        r"+0 \|",
        line,
    )


def test_the_line_is_the_published_one_to_the_letter() -> None:
    """With all figures that a line may have."""
    more = {"nan_iterations": 2, "loss_scale": 4096.0, "metrics": {"z_loss": 0.5, "aux": 0.25}, "mfu": 0.4567}
    line = format_step(step_record(tflops_per_device=12.345, iterations_without_targets=4, **more))
    assert re.sub(r"^ \[[-\d]{10} [:\d]{8}\]", " [now]", line) == (
        " [now] iteration        7/     100 | consumed samples:          224 | elapsed time per iteration (ms): 1234.6 "
        "| learning rate: 1.000000E-05 | global batch size:    32 | loss: 2.500000E+00 | aux: 2.500000E-01 | z_loss: "
        "5.000000E-01 | loss scale: 4096.0 | grad norm: 1.250 | number of skipped iterations:   1 | number of nan "
        "iterations:   2 | tokens per second: 1000 | media per second: 2.5 | TFLOP/s per device: 12.35 | MFU: 45.7% | "
        "data wait (ms): 12.5 | data wait: 1.0% | padding: 25.0% | imbalance: 1.25 | rows left out: 3 | iterations "
        "without targets: 4 | memory (MB): 1024 | ETA: 1h01m40s |"
    )


def test_a_published_console_prints_nothing_but_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither header nor summary, and no time passes after which it asks for a line."""
    console = FullConsole()
    console.begin(lambda: ["model"])
    console.advance(1)
    assert not console.is_overdue()
    console.step(step_record())
    console.close()
    console.finish(lambda: ["trained"])
    (line,) = capsys.readouterr().out.splitlines()
    assert "iteration        7/     100 |" in line


def test_a_loss_scale_stands_in_front_of_the_norm() -> None:
    assert "| loss: 2.500000E+00 | loss scale: 4096.0 | grad norm: 1.250 |" in format_step(
        step_record(loss_scale=4096.0)
    )
    assert "loss scale" not in format_step(step_record(loss_scale=1.0))


def test_the_time_is_the_fifth_field_between_colons() -> None:
    assert float(format_step(step_record()).split(":")[4].split("|")[0]) == 1234.6


def test_new_figures_hold_no_surplus_colon() -> None:
    tail = format_step(step_record()).split("number of nan iterations:")[1]
    assert all(len(field.split(":")) == 2 for field in tail.split("|")[1:-1])
    assert "| media per second: 2.5 | data wait (ms): 12.5 | data wait: 1.0% | padding: 25.0% |" in tail
    assert "| imbalance: 1.25 | rows left out: 3 |" in tail
    assert "ETA: 1h01m40s" in tail


def test_evaluation_line() -> None:
    assert "validation loss at iteration 7 | validation batches: 5 | loss: 1.500000E+00 |" in format_evaluation(
        EvaluationRecord(7, 5, 1.5)
    )
