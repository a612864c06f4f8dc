"""Curves that keep their extremes in little memory, and metrics.jsonl as curves."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from mindspeed_mm.monitor.report.curves import Curve
from mindspeed_mm.monitor.report.metrics_file import TRAINING_SECONDS, MetricsFile
from tests.support.run_folders import step_line, write_lines, write_run


def test_a_short_curve_is_all_its_points() -> None:
    curve = Curve(most=8)
    for x in range(5):
        curve.add(x, x * x)
    points = curve.points(100)
    assert (points.x, points.y) == ([0, 1, 2, 3, 4], [0, 1, 4, 9, 16])
    assert points.mean_x is points.x


@pytest.mark.parametrize("number", [1000, 4097])
def test_a_long_curve_keeps_its_extremes_ends_and_means(number: int) -> None:
    """Wherever the peak is: 16 buckets at most, each with its smallest and its largest value."""
    random.seed(number)
    values = [random.random() for _ in range(number)]
    values[number // 3], values[number // 2] = 50.0, -50.0
    curve = Curve(most=16)
    for x, y in enumerate(values):
        curve.add(x, y)
    points = curve.points(16)
    assert len(points.x) <= 32 and points.x == sorted(points.x)
    assert all(values[int(x)] == y for x, y in zip(points.x, points.y))
    assert (max(points.y), min(points.y)) == (50.0, -50.0) == (curve.high[1], curve.low[1])
    buckets = len(points.mean_y)
    assert sum(points.mean_y) / buckets == pytest.approx(sum(values) / number, abs=100 / number * 4)
    assert len(curve.points(5).mean_y) <= 5


def test_steps_that_are_trained_again_take_the_place_of_the_first_ones(tmp_path: Path) -> None:
    """A run goes on from the checkpoint of step 20 after step 30, with other losses."""
    folder = write_run(tmp_path / "run", 30)
    metrics = MetricsFile(folder)
    assert metrics.read()
    assert metrics.best["loss"] == (0.1, 30)
    with open(folder / "metrics.jsonl", "a") as file:
        for iteration in range(21, 26):
            file.write(json.dumps(step_line(iteration, loss=7.0)) + "\n")
    assert metrics.read()
    points = metrics.curves["loss"].points(1000)
    assert points.x == list(range(1, 26))
    assert points.y == [5.0 / math.sqrt(i) for i in range(1, 21)] + [7.0] * 5
    assert metrics.curves["eval_loss"].points(1000).x == [10, 20]
    assert metrics.best["loss"] == (0.15, 20)
    assert metrics.curves[TRAINING_SECONDS].high[1] == pytest.approx(3.5)  # what was trained twice took its time
    assert not metrics.read()


def test_a_torn_line_waits_for_its_rest_and_other_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = json.dumps(step_line(1)) + "\nno JSON\n[1]\n" + json.dumps({"iteration": "x", "loss": 1}) + "\n"
    second = json.dumps(step_line(2, loss=None)) + "\n"
    metrics = MetricsFile(tmp_path)
    assert not metrics.read()  # there is no file yet
    path.write_text(whole + second[:20])
    assert metrics.read()
    assert metrics.last == step_line(1)
    path.write_text(whole + second)
    assert metrics.read()
    assert metrics.curves["loss"].points(9).x == [1] and metrics.curves["grad_norm"].points(9).x == [1, 2]


def test_another_file_of_the_name_is_read_from_its_start(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path)
    write_lines(tmp_path / "metrics.jsonl", map(step_line, range(1, 9)))
    assert metrics.read()
    (tmp_path / "metrics.jsonl").rename(tmp_path / "metrics.1.jsonl")
    write_lines(tmp_path / "metrics.jsonl", map(step_line, range(1, 4)))
    assert metrics.read()
    assert metrics.curves["loss"].points(99).x == [1, 2, 3]
