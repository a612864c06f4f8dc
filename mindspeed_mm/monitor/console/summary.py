"""What has become of a run, in a few lines at its end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from mindspeed_mm.checkpoint.run_folder import REPORT_PAGE
from mindspeed_mm.configs.eval_metrics import EVAL_METRICS, improves
from mindspeed_mm.configs.run import Run
from mindspeed_mm.monitor.console import words
from mindspeed_mm.monitor.records import EvaluationRecord, StepRecord

_NAMES = 12


class Totals:
    """A sink that adds up what a launch of a run has done; see the attributes."""

    def __init__(self, iteration: int, samples: int, tokens: int) -> None:
        """
        Args:
            iteration, samples, tokens: those of the checkpoint that the launch goes on from.
        """
        self._start = iteration, samples, tokens
        self.first: StepRecord | None = None
        self.last: StepRecord | None = None
        self.training_seconds = self.wait_seconds = 0.0
        self.best: dict[str, tuple[float, int]] = {}  # figure → its best value and the step before it
        self.memory_bytes: int | None = None

    def step(self, record: StepRecord) -> None:
        """Add the interval of steps that ends with a logged one."""
        steps = record.iteration - (self._start[0] if self.last is None else self.last.iteration)
        self.first, self.last = self.first or record, record
        self.training_seconds += record.step_ms / 1000 * steps
        self.wait_seconds += (record.data_wait_ms or 0.0) / 1000 * steps
        self.memory_bytes = record.memory_bytes

    def evaluation(self, record: EvaluationRecord) -> None:
        """Keep an evaluation's figures that are the best so far."""
        generated = {} if record.generated is None else record.generated.figures
        figures = {"loss": record.loss, **generated}
        for name in EVAL_METRICS:
            if name in figures and improves(name, figures[name], self.best[name][0] if name in self.best else None):
                self.best[name] = figures[name], record.iteration

    def close(self) -> None:
        """Nothing is open."""

    @property
    def done(self) -> tuple[int, int, int]:
        """Steps, samples and tokens of this launch."""
        if self.last is None:
            return 0, 0, 0
        now = self.last.iteration, self.last.consumed_samples, self.last.consumed_tokens
        steps, samples, tokens = (after - before for after, before in zip(now, self._start, strict=True))
        return steps, samples, tokens


def summary_lines(run: Run, totals: Totals, seconds: Mapping[str, float], *, is_over: bool) -> list[str]:
    """Return the lines about a launch that has ended, but by an error.

    Args:
        totals: what it has done.
        seconds: name of what isn't training → its time in seconds.
        is_over: whether no step is left.
    """
    if totals.first is None or totals.last is None:
        return []
    return [f"{name:<{_NAMES}}{text}" for name, text in _facts(run, totals, seconds, is_over)]


def _facts(run: Run, totals: Totals, seconds: Mapping[str, float], is_over: bool) -> Iterator[tuple[str, str]]:
    first, last = totals.first, totals.last
    assert first is not None and last is not None, "a step has been logged"
    steps, samples, tokens = totals.done
    parts = [words.counted(steps, "step"), words.counted(samples, "sample")]
    if tokens and not run.generates_media:
        parts += [f"{words.amount(tokens)} tokens", f"{words.amount(_per_second(tokens, totals))} tokens/s"]
    else:
        parts.append(f"{words.amount(_per_second(samples, totals))} samples/s")
    yield "trained", ", ".join(parts)
    times = {"training": totals.training_seconds, **{name: value for name, value in seconds.items() if value >= 0.5}}
    wait = totals.wait_seconds / max(totals.training_seconds, 1e-9)
    text = ", ".join(f"{name} {words.duration(value)}" for name, value in times.items())
    yield "time", f"{text}; {words.per_cent(wait)} of training waiting for data"
    losses = [f"{words.loss(record.loss)} at step {record.iteration}" for record in (first, last)]
    loss = ", ".join(losses[first is last :])
    bad = {"skipped": last.skipped_iterations, "NaN": last.nan_iterations}
    yield (
        "loss",
        ", ".join([loss, *(f"{words.counted(number, 'step')} {name}" for name, number in bad.items() if number)]),
    )
    if totals.best:
        found = ((name, *totals.best[name]) for name in EVAL_METRICS if name in totals.best)
        best = (f"{n} {words.loss(v) if n == 'loss' else words.figure(v)} at step {i}" for n, v, i in found)
        yield "evaluation", f"best {', '.join(best)}"
    if totals.memory_bytes is not None:
        yield "memory", f"{words.gibibytes(totals.memory_bytes)} at most on this device"
    if run.checkpoint.save:
        yield from _what_is_there(Path(run.checkpoint.save), run, is_over)


def _what_is_there(folder: Path, run: Run, is_over: bool) -> Iterator[tuple[str, str]]:
    export = folder / "hf"
    is_exported = is_over and run.checkpoint.save_hf is not None and export.is_dir()
    yield "written", f"{folder}" + (f", exported to {export}" if is_exported else "")
    if run.logging.report:
        yield "report", f"{folder / REPORT_PAGE}"
    if not is_over:
        yield "go on", f"mindspeed-mm train {folder} --load {folder}"
    elif run.model is not None and not run.generates_media:
        yield "try it", f"mindspeed-mm chat {export if is_exported else folder}"


def _per_second(number: float, totals: Totals) -> float:
    return number / max(totals.training_seconds, 1e-9)
