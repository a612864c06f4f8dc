"""A tracker as a sink: a thread of its own hands the figures on, and no fault of a tracker reaches the run."""

from __future__ import annotations

import io
import math
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple

from PIL import Image

from mindspeed_mm.checkpoint.run_folder import METRICS
from mindspeed_mm.configs.recipe import DrawnSample
from mindspeed_mm.monitor.metrics import read_metrics
from mindspeed_mm.monitor.records import EvaluationRecord, StepRecord
from mindspeed_mm.monitor.trackers.base import Kept, Picture, RecordKind, TrackedRun, Tracker
from mindspeed_mm.monitor.trackers.kept import KeptFile
from mindspeed_mm.utils.log import logger
from mindspeed_mm.utils.text import shorten

#: records that wait for a tracker at most; further ones are lost, and counted
_WAITING = 10_000
#: records that come to a tracker together at most
_TOGETHER = 40
#: how long the end of a run waits for a tracker to take what is left, and to finish
CLOSE_SECONDS = 90.0
#: of one tracker after the other, as they change what belongs to the process
_OPENING = threading.Lock()


class _Record(NamedTuple):
    kind: RecordKind
    iteration: int
    figures: dict[str, float]
    samples: Sequence[DrawnSample] = ()


class TrackerSink:
    """Hands the figures of logged steps and evaluations on to a tracker.

    The tracker is opened, written to and finished by one thread, so that training waits for none of it, and so that
    the tracker leaves the handlers of signals alone, which only the main thread may set. Its package is imported
    before: a loader's worker that is forked meanwhile would wait forever for the lock of a half-imported module.

    If the tracker can't be opened, or raises, there is one warning; records that it lacks are counted, and told at the
    end. Steps before the checkpoint that a run goes on from are taken from metrics.jsonl, as far as it lacks them.
    """

    def __init__(
        self,
        name: str,
        title: str,
        run: TrackedRun,
        load: Callable[[], Callable[[TrackedRun], Tracker]],
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        """Begin to open the tracker.

        Args:
            name, title: of the tracker, in file names and in messages.
            run: the run; what an earlier start of it has kept of the tracker is added.
            load: imports what the tracker needs, and returns what begins or continues the run there.
            close_seconds: how long `close` waits.
        """
        self._title, self._close_seconds = title, close_seconds
        self._run = run
        self._file = KeptFile(run.folder, name)
        self._records: queue.Queue[_Record | None] = queue.Queue(_WAITING)
        self._offered = self._offered_before = self._taken = 0
        self._has_warned = self._has_failed = self._is_over = False
        self._thread: threading.Thread | None = None
        try:
            open_run = load()
        except Exception as error:
            self._warn(f"{title} can't be imported", error)
            return
        self._thread = threading.Thread(target=self._work, args=(open_run,), name=f"tracker {name}", daemon=True)
        self._thread.start()

    def step(self, record: StepRecord) -> None:
        """Hand a step on; returns at once."""
        self._offer(_Record("step", record.iteration, figures_of_line(record.line)))

    def evaluation(self, record: EvaluationRecord) -> None:
        """Hand an evaluation on; returns at once."""
        self._offer(_Record("evaluation", record.iteration, figures_of_line(record.line)))

    def samples(self, iteration: int, samples: Sequence[DrawnSample]) -> None:
        """Hand drawn samples on; returns at once."""
        self._offer(_Record("samples", iteration, {}, samples))

    def close(self) -> None:
        """Let the tracker take what is left and finish, and say how many records it lacks.

        An error that is being handled is the one that ends the run.
        """
        self._has_failed = sys.exception() is not None
        thread, deadline = self._thread, time.monotonic() + self._close_seconds
        if thread is not None and thread.is_alive():
            with suppress(queue.Full):
                self._records.put(None, timeout=self._close_seconds)
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                logger.warning(
                    f"{self._title} hasn't finished after {self._close_seconds:g} s; the run ends without it"
                )
        offered = self._offered + self._offered_before
        if offered > self._taken:
            elsewhere = "" if self._run.folder is None else f"; {METRICS} has all"
            logger.warning(f"{self._title} lacks {offered - self._taken} of {offered} records{elsewhere}")

    def _offer(self, record: _Record) -> None:
        self._offered += 1
        with suppress(queue.Full):
            self._records.put_nowait(record)

    def _work(self, open_run: Callable[[TrackedRun], Tracker]) -> None:
        tracker = self._open(open_run)
        if tracker is None:
            return
        kept = tracker.kept
        before = [record for record in self._records_before() if record.iteration > kept.reached(record.kind)]
        self._offered_before = len(before)
        for start in range(0, len(before), _TOGETHER):
            kept = self._take(tracker, kept, before[start : start + _TOGETHER])
        while records := self._gather(tracker.gather_seconds):
            kept = self._take(tracker, kept, records)
        try:
            tracker.close(failed=self._has_failed)
        except Exception as error:
            self._warn(f"{self._title} hasn't finished", error)
        else:
            self._keep(kept)

    def _open(self, open_run: Callable[[TrackedRun], Tracker]) -> Tracker | None:
        earlier = self._file.read() if self._run.iteration else None
        try:
            with _OPENING, _without_input():
                tracker = open_run(replace(self._run, earlier=earlier))
        except Exception as error:
            self._warn(f"{self._title} can't be opened", error)
            return None
        self._keep(tracker.kept)
        line, first, last = f"{self._title}: {tracker.kept.place}", self._run.iteration + 1, tracker.kept.step
        if last >= first:
            line += f"; it has steps {first} to {last} of an earlier start, which aren't logged again"
        logger.info(line)
        return tracker

    def _gather(self, seconds: float) -> list[_Record]:
        """Wait for a record, and for some time for those that come after it; none: there are no more."""
        records: list[_Record] = []
        deadline = None
        while not self._is_over and len(records) < (_TOGETHER if seconds else 1):
            try:
                record = self._records.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            deadline = deadline or time.monotonic() + seconds
            if record is None:
                self._is_over = True
            else:
                records.append(record)
        return records

    def _take(self, tracker: Tracker, kept: Kept, records: Sequence[_Record]) -> Kept:
        """Log records; returns what is kept now."""
        # an earlier start has logged the others: it had come further than its last checkpoint
        new = [record for record in records if record.iteration > kept.reached(record.kind)]
        self._taken += len(records) - len(new)
        if not new:
            return kept
        try:
            if figures := [(record.iteration, record.figures) for record in new if record.kind != "samples"]:
                tracker.log(figures)
            for record in new:
                if record.kind == "samples":
                    tracker.show(_pictures_of(record.samples), record.iteration)
        except Exception as error:
            first = new[0]
            more = f", and {len(new) - 1} more records" if len(new) > 1 else ""
            self._warn(f"{self._title} lacks the {first.kind} of iteration {first.iteration}{more}", error)
            return kept
        self._taken += len(new)
        for record in new:
            kept = kept.with_reached(record.kind, record.iteration)
        if tracker.is_durable:
            self._keep(kept)
        return kept

    def _keep(self, kept: Kept) -> None:
        try:
            self._file.write(kept)
        except OSError as error:
            self._warn(f"how far {self._title} has come can't be kept in the run folder", error)

    def _records_before(self) -> Iterator[_Record]:
        """What metrics.jsonl has of the steps before this start, in their order; of one that came twice, the later."""
        if not self._run.iteration or self._run.folder is None or not (self._run.folder / METRICS).exists():
            return
        found: dict[tuple[int, bool], _Record] = {}
        for line in read_metrics(self._run.folder / METRICS):
            iteration, is_evaluation = line.get("iteration"), "eval_batches" in line
            if isinstance(iteration, int) and iteration <= self._run.iteration:
                kind: RecordKind = "evaluation" if is_evaluation else "step"
                found[iteration, is_evaluation] = _Record(kind, iteration, figures_of_line(line))
        for key in sorted(found):
            yield found[key]

    def _warn(self, what: str, error: Exception) -> None:
        if not self._has_warned:
            said = shorten(" ".join(str(error).split()), 300)
            logger.warning(f"{what} ({type(error).__name__}: {said}); training goes on")
        self._has_warned = True


def figures_of_line(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a line of metrics.jsonl by name; figures by kind get names such as media/image."""
    flat: dict[str, Any] = {}
    for name, value in line.items():
        flat.update({f"{name}/{kind}": v for kind, v in value.items()} if isinstance(value, Mapping) else {name: value})
    return {
        name: value
        for name, value in flat.items()
        if isinstance(value, (int, float)) and math.isfinite(value) and name != "iteration"
    }


def _pictures_of(samples: Sequence[DrawnSample]) -> dict[str, Picture]:
    """Name → picture: samples/prompt-0, or samples/prompt-0/frame-1 of a clip."""
    found = {}
    for sample in samples:
        for ending, content in sample.files.items():
            name, _, kind = f"samples/prompt-{sample.index}{ending.replace('-frame', '/frame')}".rpartition(".")
            if kind == "jpg":
                found[name] = Picture(Image.open(io.BytesIO(content)).convert("RGB"), sample.prompt)
    return found


@contextmanager
def _without_input() -> Iterator[None]:
    """Trackers ask for a login at a terminal; nobody waits there to answer a process of a launch."""
    before, sys.stdin = sys.stdin, io.StringIO()
    try:
        yield
    finally:
        sys.stdin = before
