"""Saving a snapshot as a checkpoint, in the foreground or in the background, and handling failures.

The steps: snapshot → hidden folder → every rank writes its files → every rank computes their checksums → manifest →
rename → tracker → best.json → deletion of old checkpoints. All ranks run each step together (see `agreement`): a save
succeeds or fails on all of them, and a failed save leaves no files behind.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from mindspeed_mm.checkpoint.agreement import Agreement, RankFailure, StepFailed, first_line
from mindspeed_mm.checkpoint.best import BestCheckpoint
from mindspeed_mm.checkpoint.manifest import sum_files, write_manifest
from mindspeed_mm.checkpoint.run_folder import RunFolder, find_checkpoint, iteration_directory, working_directory
from mindspeed_mm.checkpoint.snapshot import Snapshot
from mindspeed_mm.utils.errors import CheckpointError
from mindspeed_mm.utils.launch import is_first_rank
from mindspeed_mm.utils.log import info_rank0, logger, notice

TakeSnapshot = Callable[[bool], Snapshot]


@dataclass(frozen=True)
class SaveOutcome:
    """The outcome of a save; the same on all ranks.

    Attributes:
        iteration: the step after which the snapshot was taken.
        failure: why the save failed; None: the checkpoint is visible.
    """

    iteration: int
    failure: StepFailed | None = None


class CheckpointSaver:
    """Saves checkpoints into a run folder, on all ranks together, one at a time.

    Attributes:
        last_saved: iteration of the last visible checkpoint, as of this rank's last `poll` or `wait`.
        best: the visible checkpoint that best.json names, likewise; None: there is none.
        asks_to_stop: whether a background save has failed and --on-save-failure is exit. A rank may notice it a step
            before another one, so all ranks must synchronize the request before they stop.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        in_background: bool,
        keep: int | None = None,
        exit_on_failure: bool = False,
        timeout_minutes: float = 60.0,
        last_saved: int = -1,
        best: BestCheckpoint | None = None,
        check_folder: Callable[[], None] = lambda: None,
    ) -> None:
        """
        A collective: creates a process group in addition to that of training.

        Args:
            root: the run folder.
            in_background: training continues as soon as the state is copied.
            keep: number of newest checkpoints to keep; None: all.
            exit_on_failure: a failed save ends the run.
            timeout_minutes: how long ranks wait for a rank that is writing; at least an hour.
            last_saved: iteration of the checkpoint that the run resumes from.
            best: what best.json names.
            check_folder: called on rank 0 before files are written; raises if the folder belongs to another run.
        """
        self.root = Path(root)
        self.last_saved, self.best = last_saved, best
        self.asks_to_stop, self._why = False, ""
        self._in_background, self._exit_on_failure = in_background, exit_on_failure
        self._group = dist.new_group(backend="gloo", timeout=timedelta(minutes=max(60.0, timeout_minutes)))
        self._ranks = Agreement(self._group, self.root)
        self._folder, self._check_folder = RunFolder(self.root, keep), check_folder
        self._running: _Running | None = None

    def save(
        self, iteration: int, take: TakeSnapshot, *, best: BestCheckpoint | None = None, is_last: bool = False
    ) -> SaveOutcome | None:
        """Save the snapshot that `take` returns as the checkpoint of `iteration`.

        Args:
            take: (detached) → snapshot; see `Backend.snapshot`.
            best: what best.json says once the checkpoint is visible; None: it isn't the best one.
            is_last: training has ended: wait for the end of the save, and raise if it fails.

        Returns:
            the outcome; None: the save continues in the background, and `poll` will return its outcome.

        Raises:
            CheckpointError: on all ranks: the save failed, and it is the last one or --on-save-failure is exit.
        """
        running = _Running(iteration, best, in_background=self._in_background and not is_last)
        if self._running is not None and self._running.thread.is_alive():
            notice(
                "a checkpoint is due while the one before is still being written, and training waits for it; "
                "a longer --save-interval spares that"
            )
        self.wait()
        running.take(take)
        if running.in_background:
            self._running = running
            running.thread = threading.Thread(target=self._run, args=(running,), name="checkpoint-saver", daemon=True)
            running.thread.start()
            return None
        self._run(running)
        return self._conclude(running, is_last=is_last)

    def is_best(self, candidate: BestCheckpoint) -> bool:
        """Whether an evaluation is better than that of the visible checkpoint in best.json; the same on all ranks.

        Waits for the background save only if it is better than the one before, as the save may fail.

        Raises:
            CheckpointError: see `wait`.
        """
        if not candidate.beats(self.best):
            return False
        self.wait()
        return candidate.beats(self.best)

    def poll(self) -> SaveOutcome | None:
        """Check without waiting whether the background save has ended, and log its failure.

        Returns:
            its outcome; None: it has not ended, or there is none.

        It never raises: see `asks_to_stop`.
        """
        if self._running is None or self._running.thread.is_alive():
            return None
        return self._join()

    def wait(self) -> SaveOutcome | None:
        """Wait for the background save, if there is one.

        Raises:
            CheckpointError: on all ranks: this save or an earlier one failed, and --on-save-failure is exit.
        """
        outcome = self._join()
        if self.asks_to_stop:
            raise CheckpointError(self._why)
        return outcome

    def close(self) -> None:
        """Wait for the background save and destroy the process group, also after an error."""
        self._join()
        with contextlib.suppress(RuntimeError):  # the group may be broken at the end of a run
            dist.destroy_process_group(self._group)

    def __enter__(self) -> CheckpointSaver:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _join(self) -> SaveOutcome | None:
        running, self._running = self._running, None
        if running is None:
            return None
        running.thread.join()
        try:
            return self._conclude(running, is_last=False)
        except CheckpointError as error:
            self.asks_to_stop, self._why = True, str(error)
            return SaveOutcome(running.iteration, running.failure)

    def _conclude(self, running: _Running, *, is_last: bool) -> SaveOutcome:
        """Return the outcome of a save that has ended; log its failure, or raise it if it ends the run."""
        if running.failure is None:
            self.last_saved = running.iteration
            self.best = running.best or self.best
            return SaveOutcome(running.iteration)
        sentence = self._describe(running.iteration, running.failure)
        if is_last or self._exit_on_failure:
            raise CheckpointError(f"{sentence}; start again with --load '{self.root}' once that is seen to")
        if is_first_rank():
            logger.error(f"{sentence}; training goes on, and saves again when it is due")
        return SaveOutcome(running.iteration, running.failure)

    def last_good(self) -> str:
        """Wait for the background save, and return a clause that names the last visible checkpoint."""
        self._join()
        try:
            return f"the last good checkpoint is '{find_checkpoint(self.root).directory}'"
        except CheckpointError:
            return f"'{self.root}' holds no checkpoint yet"

    def _describe(self, iteration: int, failure: StepFailed) -> str:
        return f"the checkpoint of iteration {iteration} could not be saved: {failure}; {self.last_good()}"

    def _run(self, running: _Running) -> None:
        """Run all steps of a save on this thread."""
        try:
            folder = self._write(running)
        except StepFailed as failure:
            running.failure = failure
        except Exception as error:  # a background thread would lose it otherwise
            running.failure = StepFailed("saving", [RankFailure(self._ranks.rank, first_line(error))])
        else:
            running.failure = None
            info_rank0(f"saved checkpoint {folder} ({running.times()}){running.rating()}")
        running.snapshot = Future()
        if self._ranks.rank == 0:
            self._folder.discard(running.iteration) if running.failure else self._folder.forget_old()

    def _write(self, running: _Running) -> Path:
        ranks, is_first = self._ranks, self._ranks.rank == 0
        working = working_directory(self.root, running.iteration)

        def prepare() -> None:
            running.snapshot.result()
            if is_first:
                self._check_folder()
                self._folder.open(running.iteration)

        def write() -> list[str]:
            return running.snapshot.result().write(working, self._group)

        def publish() -> None:
            if is_first:
                self._check_folder()
                write_manifest(working, running.iteration, {name: s for part in sums for name, s in part.items()})
                self._folder.publish(running.iteration)

        def mark() -> None:
            if is_first and running.best is not None:
                self._folder.mark_best(running.best)

        ranks.step("preparing the save", prepare)
        names = ranks.step("writing the files", write)[ranks.rank]
        sums = ranks.step("summing the files", lambda: sum_files(working, names))
        ranks.step("making the checkpoint visible", publish)
        if running.best is not None:
            ranks.step("naming it in best.json", mark)
        return iteration_directory(self.root, running.iteration)


@dataclass
class _Running:
    """A save in progress.

    Attributes:
        best: what best.json will say; None: nothing new.
        snapshot: the snapshot, or the error of taking it; released when the save has ended.
        failure: why the save failed; None: the checkpoint is visible.
    """

    iteration: int
    best: BestCheckpoint | None
    in_background: bool
    snapshot: Future[Snapshot] = field(default_factory=Future)
    failure: StepFailed | None = field(default_factory=lambda: StepFailed("saving", []))
    started: float = field(default_factory=time.perf_counter)
    blocked: float = 0.0
    thread: threading.Thread = field(default_factory=threading.Thread)

    def take(self, take: TakeSnapshot) -> None:
        """Take the snapshot, or record the error of taking it."""
        try:
            self.snapshot.set_result(take(self.in_background))
        except Exception as error:
            self.snapshot.set_exception(error)
        self.blocked = time.perf_counter() - self.started

    def times(self) -> str:
        """Return a phrase with the durations for the log line."""
        total = time.perf_counter() - self.started
        blocked = self.blocked if self.in_background else total
        return f"training waited {blocked:.2f} s, {total:.2f} s in all"

    def rating(self) -> str:
        """Return a clause for the log line about the best checkpoint so far; "": this one isn't."""
        return "" if self.best is None else f"; the best so far, {self.best.metric} {self.best.value:.6E}"
