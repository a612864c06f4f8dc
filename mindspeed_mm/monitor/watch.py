"""Collect the steps of a run, and hand records of them on to what logs them: console, metrics.jsonl, tensorboard."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from mindspeed_mm import accelerator
from mindspeed_mm.configs.recipe import DrawnSample
from mindspeed_mm.data.loading.counting import BatchCounts
from mindspeed_mm.monitor.console.base import Console
from mindspeed_mm.monitor.recording.recording import Recording
from mindspeed_mm.monitor.records import EvaluationRecord, SampleSink, Sink, StepRecord
from mindspeed_mm.monitor.row_log import RowLog

#: The first steps of a run are all logged: they show soonest that a run is set up wrongly.
FIRST_STEPS = 10


class LoggedOutcome(Protocol):
    """The outcome of a step, as far as it is logged."""

    @property
    def loss(self) -> float:
        """Global loss of the step."""

    @property
    def skip_reason(self) -> str:
        """Why the step was skipped: "not finite" (loss or gradient) or "no targets"; "": it wasn't."""

    @property
    def expert_shares(self) -> Callable[[], dict[str, list[float]]]:
        """() → layer → share of its tokens that each expert got."""


class Watch:
    """Collects steps, and hands the figures of those that are logged on to sinks.

    The first ten steps of a run, every `log_interval`-th one, the last one, and those that the console of a rank asks
    for are logged.

    Attributes:
        seconds: work that is no training step → its time so far, in seconds.
        skipped_iterations, nan_iterations, iterations_without_targets: numbers of steps so far.
        rows_left_out: rows that could not be used so far.
    """

    _flops: float | None  # of the interval; None: unknown
    _imbalance: float

    def __init__(
        self,
        *,
        sinks: Sequence[Sink],
        console: Console,
        log_interval: int,
        train_iters: int,
        global_batch_size: int,
        world_size: int = 1,
        compute_dtype: str = "fp32",
        row_log: RowLog | None = None,
        recording: Recording | None = None,
    ) -> None:
        """
        Args:
            sinks: what writes the records on this rank; none on a rank that writes nothing.
            console: what this rank shows.
            world_size: devices that share a step's FLOPs.
            compute_dtype: bf16, fp16 or fp32: its peak is the reference of MFU.
            row_log: writes the rows of this rank, whether or not the rank logs anything else.
            recording: what this rank records for the report.
        """
        self._row_log, self._recording = row_log, recording
        self._world_size, self._compute_dtype = world_size, compute_dtype
        self._console = console
        self._sinks: tuple[Sink, ...] = (*sinks, console)
        self._log_interval = max(1, log_interval)
        self._train_iters = train_iters
        self._global_batch_size = global_batch_size
        self.seconds: dict[str, float] = {}
        self.rows_left_out = 0
        self.skipped_iterations = 0
        self.nan_iterations = 0
        self.iterations_without_targets = 0
        self._memory = 0  # that the other ranks don't know yet
        self._start_interval()

    def begin(self, header: Callable[[], Sequence[str]]) -> None:
        """Let the console show what is known of the run; see `Console.begin`."""
        self._console.begin(header)

    def finish(self, summary: Callable[[], Sequence[str]]) -> None:
        """Let the console show what has become of the run; see `Console.finish`."""
        self._console.finish(summary)

    def asks_to_log(self) -> bool:
        """Whether this rank asks for the running step to be logged, as its console has shown nothing for long.

        Ranks have clocks of their own, so they agree: the step's reduction tells all of them (`PendingStep.log`).
        """
        return self._console.is_overdue()

    def take_memory(self) -> int:
        """Return the largest memory of this rank's device so far, once after each logged step; 0: it was told before.

        The next step's reduction shares it with all ranks.
        """
        memory, self._memory = self._memory, 0
        return memory

    def wants_result(self, iteration: int) -> bool:
        """Whether this step's figures will be read whoever asks (a host sync on devices with a queue)."""
        return iteration <= FIRST_STEPS or iteration % self._log_interval == 0 or iteration == self._train_iters

    def add(self, iteration: int, counts: BatchCounts, outcome: Callable[[], LoggedOutcome]) -> None:
        """Add a step to the interval, and write its rows.

        Args:
            counts: counts of its data, over all ranks.
            outcome: returns its outcome; called at the end of the interval only, as the device may still compute it.
        """
        if self._row_log is not None:
            self._row_log.write(iteration, counts.row_ids)
        if self._recording is not None:
            self._recording.count(counts)
        self._console.advance(iteration)
        self._steps += 1
        self._outcomes.append(outcome)
        self._counts.tokens += counts.tokens
        self._counts.positions += counts.positions
        self._flops = None if counts.flops is None or self._flops is None else self._flops + counts.flops
        self._counts.wait_seconds += counts.wait_seconds
        for kind, number in counts.media.items():
            self._counts.media[kind] = self._counts.media.get(kind, 0) + number
        self._imbalance += counts.imbalance if counts.cost else 0.0
        self.rows_left_out += counts.rows_left_out

    def log_step(
        self,
        iteration: int,
        *,
        loss: float,
        grad_norm: float,
        learning_rate: float,
        loss_scale: float,
        consumed_samples: int,
        consumed_tokens: int,
        metrics: dict[str, float],
    ) -> None:
        """Log the interval that ends with this step; its line is in metrics.jsonl when this returns."""
        self._count_failures()
        elapsed = time.perf_counter() - self._started
        step_seconds = elapsed / max(1, self._steps)
        counts = self._counts
        per_device = self._flops / elapsed / self._world_size if self._flops and elapsed else None
        peak = accelerator.current().peak_flops(self._compute_dtype)
        self._memory = accelerator.current().max_memory_allocated()
        record = StepRecord(
            iteration=iteration,
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            loss_scale=loss_scale,
            consumed_samples=consumed_samples,
            consumed_tokens=consumed_tokens,
            global_batch_size=self._global_batch_size,
            step_ms=step_seconds * 1000,
            tokens_per_second=counts.tokens / elapsed if counts.tokens and elapsed else None,
            media_per_second={kind: number / elapsed for kind, number in counts.media.items()} if elapsed else {},
            data_wait_ms=counts.wait_seconds / max(1, self._steps) * 1000,
            data_wait_fraction=counts.wait_seconds / elapsed if elapsed else None,
            padding_fraction=1 - counts.tokens / counts.positions if counts.positions else None,
            imbalance=self._imbalance / self._steps if self._imbalance else None,
            rows_left_out=self.rows_left_out,
            tflops_per_device=per_device / 1e12 if per_device else None,
            mfu=per_device / peak if per_device and peak else None,
            memory_bytes=self._memory,
            skipped_iterations=self.skipped_iterations,
            nan_iterations=self.nan_iterations,
            iterations_without_targets=self.iterations_without_targets,
            metrics=metrics,
            train_iters=self._train_iters,
            eta_seconds=step_seconds * (self._train_iters - iteration),
        )
        for sink in self._sinks:
            sink.step(record)
        if self._recording is not None:
            self._recording.step(iteration, self._outcomes[-1]().expert_shares)
        self._start_interval()

    def log_evaluation(self, record: EvaluationRecord) -> None:
        """Log an evaluation."""
        for sink in self._sinks:
            sink.evaluation(record)

    def log_samples(self, iteration: int, samples: Sequence[DrawnSample]) -> None:
        """Keep the samples that the model has drawn after a step, and hand them on to sinks that take some."""
        if self._recording is not None:
            self._recording.draw(iteration, samples)
        for sink in self._sinks:
            if isinstance(sink, SampleSink):
                sink.samples(iteration, samples)

    @contextmanager
    def paused(self, work: str) -> Iterator[None]:
        """Return a context for work that is no training step: its time is added up by itself.

        Args:
            work: its name.
        """
        begun = time.perf_counter()
        self._console.work(work)
        yield
        self._console.work(None)
        seconds = time.perf_counter() - begun
        self._started += seconds
        self.seconds[work] = self.seconds.get(work, 0.0) + seconds

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *exc: object) -> None:
        """Flush and close all files, and leave the terminal, whatever ends the run."""
        if self._recording is not None:
            self._recording.close()  # first: a sink draws the report of it
        for sink in self._sinks:
            sink.close()
        if self._row_log is not None:
            self._row_log.close()

    def _count_failures(self) -> None:
        """Count the interval's steps that were skipped, those of them without targets, and those whose loss was NaN.

        Gradients that overflow (fp16, while the loss scale finds its height) leave the loss as it is: skipped, not nan.
        """
        for outcome in self._outcomes:
            step = outcome()
            self.skipped_iterations += step.skip_reason != ""
            self.iterations_without_targets += step.skip_reason == "no targets"
            self.nan_iterations += step.skip_reason == "not finite" and not math.isfinite(step.loss)

    def _start_interval(self) -> None:
        self._started = time.perf_counter()
        self._steps = 0
        self._outcomes: list[Callable[[], LoggedOutcome]] = []
        self._counts = BatchCounts()
        self._flops = 0.0
        self._imbalance = 0.0
