"""Short lines for people: a step or an evaluation on at most 120 columns, as often as one can read them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from mindspeed_mm.monitor.console import words
from mindspeed_mm.monitor.console.base import Console
from mindspeed_mm.monitor.records import EvaluationRecord, StepRecord

#: a run of any length has about so many lines, besides those that time asks for
LINES = 25
#: the longest silence while steps end, in seconds
SILENCE = 30.0
#: steps with a line in any run: whether it is set up rightly shows there
_FIRST = (1, 2, 5, 10)
#: data wait that a line mentions, as a share of the step
_LONG_WAIT = 0.05


class ShortConsole(Console):
    """Prints short lines: of some logged steps, or of all, of every evaluation, and header and summary."""

    def __init__(
        self,
        train_iters: int,
        *,
        shows_all: bool = False,
        in_samples: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            train_iters: steps of the run.
            shows_all: whether each logged step has a line, and no others are asked for; otherwise those that divide the
                run into about `LINES` parts, the first one of a launch, and any that comes `SILENCE` seconds after the
                last line.
            in_samples: whether speed is told in samples; otherwise in tokens, where they are known.
            clock: returns the time in seconds.
        """
        self._train_iters, self._shows_all, self._in_samples, self._clock = train_iters, shows_all, in_samples, clock
        self._stride = _round_stride(train_iters / LINES)
        self._printed, self._has_begun = clock(), False

    def begin(self, header: Callable[[], Sequence[str]]) -> None:
        """See `Console`."""
        self._print(*header())

    def is_overdue(self) -> bool:
        """See `Console`."""
        return not self._shows_all and (not self._has_begun or self._clock() - self._printed >= SILENCE)

    def step(self, record: StepRecord) -> None:
        """See `Console`."""
        number = record.iteration
        is_shown = self._shows_all or number in _FIRST or number % self._stride == 0 or number == self._train_iters
        if is_shown or self.is_overdue():
            self._print(short_step(record, in_samples=self._in_samples))
        self._has_begun = True

    def evaluation(self, record: EvaluationRecord) -> None:
        """See `Console`."""
        self._print(short_evaluation(record, self._train_iters))

    def finish(self, summary: Callable[[], Sequence[str]]) -> None:
        """See `Console`."""
        self._print(*summary())

    def _print(self, *lines: str) -> None:
        for line in lines:
            print(line, flush=True)
        self._printed = self._clock()


def short_step(record: StepRecord, *, in_samples: bool = False) -> str:
    """Return the line of a step; `in_samples`: its speed is told in samples."""
    parts = [_place(record.iteration, record.train_iters), *_figures_of(record, in_samples)]
    if record.iteration < record.train_iters:
        parts.append(f"ETA {words.duration(record.eta_seconds)}")
    return "  ".join(parts)


def _figures_of(record: StepRecord, in_samples: bool) -> list[str]:
    """A step's figures, each with its name; what is as it should be, such as no skipped step, isn't told."""
    parts = [f"loss {words.loss(record.loss)}"]
    parts += [f"{name} {words.figure(value)}" for name, value in sorted(record.metrics.items())]
    parts += [f"norm {words.figure(record.grad_norm)}", f"lr {record.learning_rate:.2e}", speed_of(record, in_samples)]
    parts.append(f"{words.step_time(record.step_ms)}/step")
    if record.mfu is not None:
        parts.append(f"MFU {words.per_cent(record.mfu)}")
    if record.memory_bytes is not None:
        parts.append(words.gibibytes(record.memory_bytes))
    return parts + troubles_of(record)


def speed_of(record: StepRecord, in_samples: bool) -> str:
    """Return tokens a second, or samples a second where those are wanted or there are no tokens."""
    if record.tokens_per_second is not None and not in_samples:
        return f"{words.amount(record.tokens_per_second)} tokens/s"
    return f"{words.amount(record.global_batch_size / max(record.step_ms, 1e-6) * 1000)} samples/s"


def troubles_of(record: StepRecord) -> list[str]:
    """Return what a reader should know of besides the usual figures."""
    parts = []
    if record.data_wait_fraction is not None and record.data_wait_fraction >= _LONG_WAIT:
        parts.append(f"data wait {words.per_cent(record.data_wait_fraction)}")
    counts = {"skipped": record.skipped_iterations, "NaN": record.nan_iterations, "rows left out": record.rows_left_out}
    return parts + [f"{name} {number}" for name, number in counts.items() if number]


def short_evaluation(record: EvaluationRecord, train_iters: int) -> str:
    """Return the line of an evaluation."""
    parts = [_place(record.iteration, train_iters), f"evaluation  loss {words.loss(record.loss)}"]
    if record.generated is not None:
        parts += [f"{name} {words.figure(value)}" for name, value in record.generated.figures.items()]
        parts.append(f"{record.generated.rows} answers")
    return "  ".join(parts)


def _place(iteration: int, train_iters: int) -> str:
    """Number and share of a step, as wide in every line of a run."""
    return f"{iteration:>{len(str(train_iters))}}/{train_iters}  {int(100 * iteration / train_iters):3d} %"


def _round_stride(least: float) -> int:
    """Return the smallest of 1, 2, 5, 10, 20, 50 … that is not below `least`."""
    power = 1
    while True:
        for digit in (1, 2, 5):
            if digit * power >= least:
                return digit * power
        power *= 10
