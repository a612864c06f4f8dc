"""metrics.jsonl as curves: figures of steps and of evaluations, over the steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mindspeed_mm.checkpoint.run_folder import METRICS
from mindspeed_mm.configs.eval_metrics import EVAL_METRICS, MetricName
from mindspeed_mm.monitor.report.curves import Curve
from mindspeed_mm.monitor.report.lines import LinesReader

#: the time of training in seconds, evaluations and saves left out, over the steps
TRAINING_SECONDS = "training_seconds"


class MetricsFile:
    """The figures of a run's metrics.jsonl; `read` adds the lines that have come since the last time.

    A run that goes on from a checkpoint repeats the steps behind it: what was logged of them before is dropped.

    Attributes:
        curves: figure → its curve; figures by kind are called media_per_second/image.
        first, last: the first and the last logged step, as written; None: there is none.
        updates: number of lines so far.
    """

    def __init__(self, folder: Path) -> None:
        """
        Args:
            folder: the run folder.
        """
        self._reader = LinesReader(folder / METRICS)
        self._forget()

    def read(self) -> bool:
        """Read what is new; returns whether there was something."""
        if self._reader.was_replaced():
            self._forget()
        before = self.updates
        for line in self._reader.new():
            iteration = line.get("iteration")
            if not isinstance(iteration, int):
                continue
            self.updates += 1
            if "eval_loss" in line:
                for name, value in _figures(line):
                    if name not in ("eval_batches", "eval_rows"):
                        self._add(name, iteration, value)
            elif "loss" in line:
                self._step(iteration, line)
        return self.updates != before

    @property
    def best(self) -> dict[MetricName, tuple[float, int]]:
        """Figure of evaluations → its best value, and the step before the first evaluation that has it."""
        found: dict[MetricName, tuple[float, int]] = {}
        for metric, facts in EVAL_METRICS.items():
            curve = self.curves.get(f"eval_{metric}")
            if curve is not None and curve.count:
                iteration, value = curve.high if facts.higher_is_better else curve.low
                found[metric] = value, int(iteration)
        return found

    def _forget(self) -> None:
        self.curves: dict[str, Curve] = {}
        self.first: dict[str, Any] | None = None
        self.last: dict[str, Any] | None = None
        self.updates = 0
        self._seconds = 0.0

    def _step(self, iteration: int, line: dict[str, Any]) -> None:
        last = self.last
        before = 0 if last is None else last["iteration"]
        if iteration <= before:
            for curve in self.curves.values():
                curve.cut(iteration)
            before = iteration - 1
        self._seconds += _number(line.get("step_ms"), 0.0) / 1000 * (iteration - before)
        self.first = self.first or line
        self.last = line
        for name, value in _figures(line):
            self._add(name, iteration, value)
        self._add(TRAINING_SECONDS, iteration, self._seconds)

    def _add(self, name: str, iteration: int, value: float) -> None:
        curve = self.curves.get(name)
        if curve is None:
            curve = self.curves[name] = Curve()
        curve.add(iteration, value)


def _figures(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the finite figures of a line."""
    for name, value in line.items():
        if isinstance(value, dict):
            yield from ((f"{name}/{kind}", v) for kind, v in _figures(value))
        elif isinstance(value, (int, float)) and name != "iteration" and math.isfinite(value):
            yield name, value


def _number(value: object, default: float) -> float:
    return float(value) if isinstance(value, (int, float)) else default
