"""Several runs beside each other: their outcomes, and what differs in what they were given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mindspeed_mm.configs.eval_metrics import EVAL_METRICS
from mindspeed_mm.monitor.console import words
from mindspeed_mm.monitor.report.metrics_file import TRAINING_SECONDS
from mindspeed_mm.monitor.report.run_record import RunRecord

#: keys of run.yaml that say where a run writes
_PLACES = ("save", "load", "tensorboard_dir", "overwrite")


@dataclass(frozen=True)
class Outcome:
    """A figure of each run.

    Attributes:
        texts: one for each run.
        best: numbers of the runs that have the best value; none where no value is better than another.
    """

    name: str
    texts: tuple[str, ...]
    best: tuple[int, ...]


def outcomes_of(runs: Sequence[RunRecord]) -> list[Outcome]:
    """Return the figures by which runs are compared, those that a run at least has."""
    found = [
        Outcome("state", tuple(run.state.name for run in runs), ()),
        _row("steps", [run.last_step or None for run in runs], lambda value: f"{value:,.0f}"),
        _row("last loss", [_last(run, "loss") for run in runs], words.loss, better=min),
        _row("lowest loss", [_lowest(run, "loss") for run in runs], words.loss, better=min),
    ]
    for metric, facts in EVAL_METRICS.items():
        values = [run.metrics.best[metric][0] if metric in run.metrics.best else None for run in runs]
        text = words.loss if metric == "loss" else words.figure
        found.append(_row(f"best {facts.title}", values, text, better=max if facts.higher_is_better else min))
    found += [
        _row("time of training", [_time(run) for run in runs], words.duration),
        _row("samples", [_last(run, "consumed_samples") for run in runs], words.amount),
        _row("tokens", [_last(run, "consumed_tokens") or None for run in runs], words.amount),
        _row("samples a second", [_speed(run, "consumed_samples") for run in runs], words.amount, better=max),
        _row("tokens a second", [_speed(run, "consumed_tokens") for run in runs], words.amount, better=max),
        _row("MFU, last", [_last(run, "mfu") for run in runs], words.per_cent, better=max),
        _row(
            "memory",
            [_last(run, "memory_bytes") for run in runs],
            _memory,
            better=min,
        ),
    ]
    return [row for row in found if any(row.texts)]


def differences_of(runs: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """Return the keys of run.yaml whose values differ, with each run's; where a run writes doesn't count."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    found = []
    for key in keys:
        values = [run.settings.get(key, "") for run in runs]
        if len(set(values)) > 1 and key.rpartition(".")[2] not in _PLACES:
            found.append((key, values))
    return found


def _row(
    name: str,
    values: Sequence[float | None],
    text: Callable[[float], str],
    better: Callable[[list[float]], float] | None = None,
) -> Outcome:
    known = [value for value in values if value is not None]
    best = better(known) if better is not None and len(set(known)) > 1 else None
    return Outcome(
        name,
        tuple("" if value is None else text(value) for value in values),
        tuple(number for number, value in enumerate(values) if best is not None and value == best),
    )


def _last(run: RunRecord, name: str) -> float | None:
    value = (run.metrics.last or {}).get(name)
    return float(value) if isinstance(value, (int, float)) else None


def _lowest(run: RunRecord, name: str) -> float | None:
    curve = run.metrics.curves.get(name)
    return curve.low[1] if curve is not None and curve.count else None


def _time(run: RunRecord) -> float | None:
    curve = run.metrics.curves.get(TRAINING_SECONDS)
    return curve.high[1] if curve is not None and curve.count else None


def _speed(run: RunRecord, name: str) -> float | None:
    number, seconds = _last(run, name), _time(run)
    return number / seconds if number and seconds else None


def _memory(value: float) -> str:
    return words.gibibytes(int(value))
