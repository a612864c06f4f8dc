"""The lock of a run folder: `run.lock` names the process that writes there.

The file's modification time is that process's heartbeat. File system locks are not used, as networked file systems may
lack them: the file is created with its content atomically, by a hard link or, if these are not supported, by exclusive
creation. Clocks of two machines are never compared: another machine's heartbeat is observed for some time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from mindspeed_mm.checkpoint.agreement import on_first_rank
from mindspeed_mm.checkpoint.lock_holder import LOCK, Holder
from mindspeed_mm.checkpoint.run_folder import RunFolder
from mindspeed_mm.parallel.gather import GatherObjects
from mindspeed_mm.utils.errors import CheckpointError, ConfigError
from mindspeed_mm.utils.log import info_rank0, logger


@contextmanager
def lock_run_folder(save: str | None, rank: int, gather: GatherObjects) -> Iterator[RunLock | None]:
    """Lock the --save folder while a run writes there, and remove incomplete files of a killed run; a collective.

    Yields:
        the lock on rank 0, None elsewhere and without `save`.

    Raises:
        ConfigError: on all ranks: another run holds the folder, or it can't be written.
    """
    if not save:
        yield None
        return
    with ExitStack() as stack:
        lock = RunLock(save) if rank == 0 else None

        def acquire() -> None:
            assert lock is not None
            stack.enter_context(lock)
            RunFolder(save).remove_leftovers()

        on_first_rank(acquire, rank, gather)
        yield lock


class RunLock:
    """The lock of a run folder, held from `__enter__` to `__exit__`; used on rank 0 only.

    The lock of a killed process is taken over: at once on the same machine, on another machine after its heartbeat has
    not changed for some time. A process that was suspended while another one took over notices it before it writes a
    checkpoint (`check`).
    """

    def __init__(self, folder: str | Path, *, beat_seconds: float = 10.0, patience_seconds: float = 60.0) -> None:
        """
        Args:
            folder: the run folder; created if it doesn't exist.
            beat_seconds: time between two heartbeats.
            patience_seconds: time without a heartbeat after which a holder on another machine is considered dead.
        """
        self.folder = Path(folder)
        self._path = self.folder / LOCK
        self._beat_seconds, self._patience = beat_seconds, patience_seconds
        self._me = Holder.this_process()
        self._successor: Holder | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="run-lock", daemon=True)

    @property
    def is_lost(self) -> bool:
        """Whether another run has taken the folder over, as of the last heartbeat."""
        return self._successor is not None

    def __enter__(self) -> RunLock:
        """Acquire the lock.

        Raises:
            ConfigError: another run holds it.
            OSError: the folder can't be written.
        """
        created = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
        self.folder.mkdir(parents=True, exist_ok=True)
        self._created = created[:1]
        while not self._create():
            found = self._read()
            if found is None:
                continue
            holder, beat = found
            if holder.token == self._me.token:  # a networked file system reported a failure after it had succeeded
                break
            self._wait_for_death(holder, beat)
            if self._take_over(holder):
                break
        for draft in self.folder.glob(f".{LOCK}.*"):  # of runs that were killed while they took the folder
            draft.unlink(missing_ok=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        """Release the lock; a folder that this run has created, and that is empty, is removed."""
        self._stopped.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            found = self._read()
            if found is not None and found[0].token == self._me.token:
                self._path.unlink()
            for folder in self._created:
                folder.rmdir()

    def check(self) -> None:
        """Check that this run still holds the lock, before files are written.

        Raises:
            CheckpointError: another run has taken it over.
        """
        self._renew()
        if self._successor is not None:
            raise CheckpointError(
                f"'{self.folder}' now belongs to another run ({self._successor}): this one gave no sign of life for "
                "too long, and writes nothing there any more"
            )

    def _wait_for_death(self, holder: Holder, beat: int) -> None:
        """Return once the holder is known to have ended.

        Raises:
            ConfigError: it is alive.
        """
        if holder.machine == self._me.machine:
            if holder.is_alive():
                raise self._refusal(holder)
            if not holder.launcher or holder.launcher != self._me.launcher:
                logger.warning(f"'{self.folder}' was held by {holder}; that process has ended, and this run takes over")
            return
        info_rank0(
            f"'{self.folder}' is held by {holder}; watching its heartbeat for {self._patience:g} s, as that is another "
            "machine"
        )
        deadline = time.monotonic() + self._patience
        while time.monotonic() < deadline:
            time.sleep(self._beat_seconds / 5)
            found = self._read()
            if found is None:
                return
            if found != (holder, beat):
                raise self._refusal(found[0])
        logger.warning(
            f"'{self.folder}' was held by {holder}; it has given no sign of life for {self._patience:g} s, and this "
            "run takes over"
        )

    def _refusal(self, holder: Holder) -> ConfigError:
        return ConfigError(
            f"--save '{self.folder}' is in use by another run: {holder}, is alive ({self._path}); wait for its end or "
            "stop it, or give this run a --save of its own"
        )

    def _create(self) -> bool:
        """Create the lock file with its content; returns False if it exists."""
        draft = self._draft()
        try:
            os.link(draft, self._path)
        except (FileExistsError, FileNotFoundError):  # not found: a run that has just acquired it removed the draft
            return False
        except OSError:  # the file system has no hard links
            return self._create_exclusively()
        finally:
            draft.unlink(missing_ok=True)
        return True

    def _create_exclusively(self) -> bool:
        try:
            with open(self._path, "x", encoding="utf-8") as file:
                file.write(self._content())
        except FileExistsError:
            return False
        return True

    def _take_over(self, dead: Holder) -> bool:
        """Replace the file of a holder that has ended; False if another run does so too and is the last one."""
        draft = self._draft()
        try:
            found = self._read()
            if found is None or found[0].token != dead.token:
                return False
            os.replace(draft, self._path)
        except FileNotFoundError:
            return False
        finally:
            draft.unlink(missing_ok=True)
        time.sleep(0.1 if dead.machine == self._me.machine else min(2.0, self._beat_seconds))
        found = self._read()
        return found is not None and found[0].token == self._me.token

    def _draft(self) -> Path:
        draft = self.folder / f".{LOCK}.{self._me.token}"
        draft.write_text(self._content(), encoding="utf-8")
        return draft

    def _content(self) -> str:
        return json.dumps(dataclasses.asdict(self._me), indent=1) + "\n"

    def _read(self) -> tuple[Holder, int] | None:
        """Return the holder and its last heartbeat [ns]; None: the lock is free."""
        try:
            with open(self._path, encoding="utf-8", errors="replace") as file:  # opened, as attributes are cached
                content, beat = file.read(), os.fstat(file.fileno()).st_mtime_ns
        except FileNotFoundError:
            return None
        try:
            return Holder(**json.loads(content)), beat
        except (ValueError, TypeError):  # cut short by a crash of its machine, or of another version
            return Holder("an unknown host", "", 0, "", "", "an unknown time", content[:200]), beat

    def _beat(self) -> None:
        while not self._stopped.wait(self._beat_seconds) and self._successor is None:
            with contextlib.suppress(OSError):  # the next one may work
                self._renew()

    def _renew(self) -> None:
        """Write a heartbeat, or record the run that has taken the lock over."""
        found = self._read()
        if found is None:  # the file was removed; if the whole folder was, this raises
            self._create()
        elif found[0].token == self._me.token:
            os.utime(self._path)
        else:
            self._successor = found[0]
