"""A line at the bottom of a terminal that is renewed while a run trains; everything else appears above it."""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TextIO

from rich.console import Console as RichConsole
from rich.live import Live
from rich.text import Text

from mindspeed_mm.monitor.console import words
from mindspeed_mm.monitor.console.base import Console
from mindspeed_mm.monitor.console.short import short_evaluation, speed_of, troubles_of
from mindspeed_mm.monitor.records import EvaluationRecord, StepRecord
from mindspeed_mm.utils.log import log_on

#: figures on the line are at most so old, in seconds, if steps are faster
FRESH = 5.0
_RENEWED_A_SECOND = 4
#: losses of the trend, and its heights
_TREND = 12
_HEIGHTS = "▁▂▃▄▅▆▇█"
_BAR = 20
_GAP = "  "

_running: LiveConsole | None = None


class LiveConsole(Console):
    """Renews one line: progress, loss and its trend, norm, rate, speed, MFU, memory, data wait, time to go.

    A thread draws it. While it is there, standard output, standard error and the package's messages go through the
    terminal's console, which writes them above the line. The cursor stays visible, so that a process that is killed
    leaves a usable terminal.
    """

    def __init__(
        self,
        train_iters: int,
        *,
        asks: bool = True,
        in_samples: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            train_iters: steps of the run.
            asks: whether steps are to be logged so often that no figure is much older than `FRESH` seconds.
            in_samples: whether speed is told in samples; otherwise in tokens, where they are known.
            clock: returns the time in seconds.
        """
        self._train_iters, self._asks, self._in_samples, self._clock = train_iters, asks, in_samples, clock
        self._iteration = 0
        self._record: StepRecord | None = None
        self._losses: deque[float] = deque(maxlen=_TREND)
        self._shown, self._work = float("-inf"), ""
        self._live: Live | None = None
        self._streams: tuple[TextIO, TextIO] = sys.stdout, sys.stderr

    def begin(self, header: Callable[[], Sequence[str]]) -> None:
        """See `Console`."""
        global _running
        self._streams = sys.stdout, sys.stderr
        for line in header():
            print(line, flush=True)
        self._terminal = RichConsole(file=sys.stdout, highlight=False)
        self._live = Live(
            console=self._terminal,
            get_renderable=lambda: self.line(self._terminal.width),
            refresh_per_second=_RENEWED_A_SECOND,
            transient=True,
        )
        self._live.start()
        self._terminal.show_cursor(True)
        self._log = log_on(sys.stdout)  # now the console's
        _running = self

    def advance(self, iteration: int) -> None:
        """See `Console`."""
        self._iteration = iteration

    def work(self, name: str | None) -> None:
        """See `Console`."""
        self._work = name or ""

    def is_overdue(self) -> bool:
        """See `Console`."""
        return self._asks and self._clock() - self._shown >= FRESH

    def step(self, record: StepRecord) -> None:
        """See `Console`."""
        self._record, self._iteration, self._shown = record, record.iteration, self._clock()
        self._losses.append(record.loss)

    def evaluation(self, record: EvaluationRecord) -> None:
        """See `Console`."""
        print(short_evaluation(record, self._train_iters), flush=True)

    def close(self) -> None:
        """See `Console`."""
        global _running
        if self._live is None:
            return
        _running, live, self._live = None, self._live, None
        live.stop()
        self.leave_streams()

    def finish(self, summary: Callable[[], Sequence[str]]) -> None:
        """See `Console`."""
        for line in summary():
            print(line, flush=True)

    def leave_streams(self) -> None:
        """Write to the streams directly again, as a forked child must: nobody there releases the console's lock."""
        sys.stdout, sys.stderr = self._streams
        for handler, stream in self._log:
            handler.stream = stream

    def line(self, width: int) -> Text:
        """Return the line for a terminal: as many figures as fit, the most important ones first.

        Args:
            width: columns of the terminal.
        """
        left = width - 1  # a full last column would wrap
        chosen: dict[int, Text] = {}
        for place, part in self._parts():
            if part.cell_len + len(_GAP) * bool(chosen) <= left:
                left -= part.cell_len + len(_GAP) * bool(chosen)
                chosen[place] = part
        line = Text(_GAP, no_wrap=True, overflow="crop", end="").join(chosen[place] for place in sorted(chosen))
        line.no_wrap, line.overflow = True, "crop"
        return line

    def _parts(self) -> list[tuple[int, Text]]:
        """Place and text of each part, in the order of their importance."""
        done = self._iteration / self._train_iters
        record = self._record
        parts = [(1, Text(f"{self._iteration}/{self._train_iters} {int(100 * done):3d} %"))]
        if self._work:
            parts.append((2, Text(f"{self._work} …", style="cyan")))
        if record is None:
            return [*parts, (0, _bar(done))]
        parts.append((3, Text(f"loss {words.loss(record.loss)}", style="bold")))
        if self._iteration < self._train_iters:
            seconds = record.step_ms / 1000 * (self._train_iters - self._iteration)
            parts.append((12, Text(f"ETA {words.duration(seconds)}", style="cyan")))
        parts += [(11, Text(text, style="yellow")) for text in troubles_of(record)[:1]]
        parts += [
            (7, Text(speed_of(record, self._in_samples))),
            (0, _bar(done)),
            (5, Text(f"norm {words.figure(record.grad_norm)}")),
        ]
        if trend := _trend(list(self._losses)):
            parts.append((4, Text(trend, style="green")))
        parts += [(6, Text(f"lr {record.learning_rate:.2e}")), (8, Text(f"{words.step_time(record.step_ms)}/step"))]
        if record.mfu is not None:
            parts.append((9, Text(f"MFU {words.per_cent(record.mfu)}")))
        if record.memory_bytes is not None:
            parts.append((10, Text(words.gibibytes(record.memory_bytes))))
        return parts


def _bar(done: float) -> Text:
    full = round(_BAR * min(1.0, done))
    return Text.assemble(("━" * full, "green"), ("━" * (_BAR - full), "bright_black"))


def _trend(losses: Sequence[float]) -> str:
    """The last finite losses as a row of heights; "": they are too few, or all alike."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    if len(finite) < 3 or low == high:
        return ""
    return "".join(_HEIGHTS[round((loss - low) / (high - low) * (len(_HEIGHTS) - 1))] for loss in finite)


def _in_a_child() -> None:
    if _running is not None:
        _running.leave_streams()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_a_child)
