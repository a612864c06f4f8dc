"""How a snapshot becomes a visible checkpoint, at once or in the background, and what happens if it doesn't.

The steps: snapshot → hidden folder → every rank writes its files → every rank sums them → manifest → rename → tracker →
old ones are forgotten. All ranks take each step together (see `agreement`): a save works on all of them or fails on all
of them, and one that fails leaves nothing behind.
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
from mindspeed_mm.checkpoint.manifest import sum_files, write_manifest
from mindspeed_mm.checkpoint.run_folder import RunFolder, find_checkpoint, iteration_directory, working_directory
from mindspeed_mm.checkpoint.snapshot import Snapshot
from mindspeed_mm.utils.errors import CheckpointError
from mindspeed_mm.utils.launch import is_first_rank
from mindspeed_mm.utils.log import info_rank0, logger, notice

TakeSnapshot = Callable[[bool], Snapshot]


@dataclass(frozen=True)
class SaveOutcome:
    """How a save ended, the same on all ranks.

    Attributes:
        iteration: the step after which the snapshot was taken.
        failure: None: the checkpoint is visible.
    """

    iteration: int
    failure: StepFailed | None = None


class CheckpointSaver:
    """Saves checkpoints into a run folder, all ranks together, one at a time.

    Attributes:
        last_saved: iteration of the last checkpoint that became visible, as far as this rank has looked.
        asks_to_stop: a save in the background has failed and --on-save-failure is exit. A rank may see it a step before
            another one does, so it has to be told to all of them before anybody stops.
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
        check_folder: Callable[[], None] = lambda: None,
    ) -> None:
        """
        All ranks together: makes a process group, beside the one that training uses.

        Args:
            in_background: training goes on as soon as the state is copied.
            keep: newest checkpoints that stay; None: all.
            exit_on_failure: a save that fails ends the run.
            timeout_minutes: how long ranks wait for one that is writing; at least an hour.
            last_saved: iteration of the checkpoint that the run goes on from.
            check_folder: called on rank 0 before anything is written; raises if the folder is another run's.
        """
        self.root = Path(root)
        self.last_saved = last_saved
        self.asks_to_stop, self._why = False, ""
        self._in_background, self._exit_on_failure = in_background, exit_on_failure
        self._group = dist.new_group(backend="gloo", timeout=timedelta(minutes=max(60.0, timeout_minutes)))
        self._ranks = Agreement(self._group, self.root)
        self._folder, self._check_folder = RunFolder(self.root, keep), check_folder
        self._running: _Running | None = None

    def save(self, iteration: int, take: TakeSnapshot, *, is_last: bool = False) -> SaveOutcome | None:
        """Save what `take` returns as `iteration`.

        Args:
            take: (detached) → snapshot; see `Backend.snapshot`.
            is_last: training does not go on: wait for the end of the save, and let nothing less than success do.

        Returns:
            how it ended; None: it goes on in the background, and `poll` will tell.

        Raises:
            CheckpointError: it failed, and was the last or --on-save-failure is exit. On all ranks.
        """
        running = _Running(iteration, in_background=self._in_background and not is_last)
        if self._running is not None and self._running.thread.is_alive():
            notice(
                "a checkpoint is due while the one before is still being written, and training waits for it; "
                "a longer --save-interval spares that"
            )
        self.wait()
        running.take(take)
        if running.in_background:
            self._running = running
            running.thread = threading.Thread(target=self._bring, args=(running,), name="checkpoint-saver", daemon=True)
            running.thread.start()
            return None
        self._bring(running)
        return self._settle(running, is_last=is_last)

    def poll(self) -> SaveOutcome | None:
        """Look, without waiting, whether the save in the background has ended; tell of its failure.

        Never raises: see `asks_to_stop`.
        """
        if self._running is None or self._running.thread.is_alive():
            return None
        return self._look()

    def wait(self) -> SaveOutcome | None:
        """Wait for the save in the background, if there is one.

        Raises:
            CheckpointError: it, or one before, failed, and --on-save-failure is exit. On all ranks.
        """
        outcome = self._look()
        if self.asks_to_stop:
            raise CheckpointError(self._why)
        return outcome

    def close(self) -> None:
        """Wait for the save in the background, and give the process group back; however the run ends."""
        self._look()
        with contextlib.suppress(RuntimeError):  # the end of the run may have torn it
            dist.destroy_process_group(self._group)

    def __enter__(self) -> CheckpointSaver:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _look(self) -> SaveOutcome | None:
        running, self._running = self._running, None
        if running is None:
            return None
        running.thread.join()
        try:
            return self._settle(running, is_last=False)
        except CheckpointError as error:
            self.asks_to_stop, self._why = True, str(error)
            return SaveOutcome(running.iteration, running.failure)

    def _settle(self, running: _Running, *, is_last: bool) -> SaveOutcome:
        """Draw the consequences of a save that has ended."""
        if running.failure is None:
            self.last_saved = running.iteration
            return SaveOutcome(running.iteration)
        sentence = self._describe(running.iteration, running.failure)
        if is_last or self._exit_on_failure:
            raise CheckpointError(f"{sentence}; start again with --load '{self.root}' once that is seen to")
        if is_first_rank():
            logger.error(f"{sentence}; training goes on, and saves again when it is due")
        return SaveOutcome(running.iteration, running.failure)

    def last_good(self) -> str:
        """A clause that names the last checkpoint that is visible, after the save in the background has ended."""
        self._look()
        try:
            return f"the last good checkpoint is '{find_checkpoint(self.root).directory}'"
        except CheckpointError:
            return f"'{self.root}' holds no checkpoint yet"

    def _describe(self, iteration: int, failure: StepFailed) -> str:
        return f"the checkpoint of iteration {iteration} could not be saved: {failure}; {self.last_good()}"

    def _bring(self, running: _Running) -> None:
        """All steps, on this thread."""
        try:
            folder = self._write(running)
        except StepFailed as failure:
            running.failure = failure
        except Exception as error:  # on this thread nobody else would hear of it
            running.failure = StepFailed("saving", [RankFailure(self._ranks.rank, first_line(error))])
        else:
            running.failure = None
            info_rank0(f"saved checkpoint {folder} ({running.times()})")
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

        ranks.step("preparing the save", prepare)
        names = ranks.step("writing the files", write)[ranks.rank]
        sums = ranks.step("summing the files", lambda: sum_files(working, names))
        ranks.step("making the checkpoint visible", publish)
        return iteration_directory(self.root, running.iteration)


@dataclass
class _Running:
    """A save on its way.

    Attributes:
        snapshot: what is saved, or why it could not be taken; let go of when the save has ended.
        failure: None: the checkpoint is visible.
    """

    iteration: int
    in_background: bool
    snapshot: Future[Snapshot] = field(default_factory=Future)
    failure: StepFailed | None = field(default_factory=lambda: StepFailed("saving", []))
    started: float = field(default_factory=time.perf_counter)
    blocked: float = 0.0
    thread: threading.Thread = field(default_factory=threading.Thread)

    def take(self, take: TakeSnapshot) -> None:
        """Take the snapshot; training is blocked until then, or to the end of a save that is not in the background."""
        try:
            self.snapshot.set_result(take(self.in_background))
        except Exception as error:
            self.snapshot.set_exception(error)
        self.blocked = time.perf_counter() - self.started

    def times(self) -> str:
        """How long it took."""
        total = time.perf_counter() - self.started
        blocked = self.blocked if self.in_background else total
        return f"training waited {blocked:.2f} s, {total:.2f} s in all"
