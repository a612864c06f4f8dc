"""Files and folders that one process of each node makes before training, and that appear when they are complete."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from mindspeed_mm.utils.errors import DataError
from mindspeed_mm.utils.launch import is_first_local_rank, rank_word, this_launch
from mindspeed_mm.utils.log import logger

#: seconds after which a process checks that it sees the folder of the process that builds
PATIENCE = 60.0


def build_once(path: Path, build: Callable[[Path], None], what: str, key: str, *, overwrite: bool = False) -> None:
    """Make a file or a folder in the first process of the node, and wait for it in the others.

    Nodes that share its folder make one. It is made under a temporary name and renamed: what an interrupted build
    leaves is never read, and is removed by the next one. Waiting is no collective, and has no time limit.

    Args:
        path: What is made; a file has a suffix.
        build: Makes it under the name that it is given, in this process.
        what: Its name, for messages.
        key: The key that names its folder, for messages.
        overwrite: Make it anew, once a launch.

    Raises:
        DataError: It can't be written, or this process doesn't see what the node's first one makes.
    """
    lock = path.with_name(f"{path.stem}.lock")
    since = _launch_time() if overwrite else 0.0
    if not is_first_local_rank():
        _await(path, lock, since, what, key)
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{key} {path.parent} can't be made: {error.strerror}") from error
    with FileLock(lock):
        if not _is_there(path, since):
            _build(path, build, what)


def _build(path: Path, build: Callable[[Path], None], what: str) -> None:
    for left in path.parent.glob(f"{path.stem}.*.tmp"):
        _remove(left)
    working, before = (path.with_name(f"{path.stem}.{os.getpid()}{kind}.tmp") for kind in ("", ".before"))
    started = time.perf_counter()
    logger.info(f"building {what} in {path}")
    try:
        build(working)
        for file in working.rglob("*") if working.is_dir() else [working]:
            if file.is_file():
                with open(file, "rb") as written:
                    os.fsync(written.fileno())
        if path.is_dir():
            os.replace(path, before)  # a folder doesn't take the place of another
        os.replace(working, path)
    except OSError as error:
        raise DataError(f"{what} {path} can't be written: {error.strerror or error}") from error
    finally:
        _remove(working)
        _remove(before)
    logger.info(f"{what} built in {time.perf_counter() - started:.1f} s")


def _is_there(path: Path, since: float) -> bool:
    try:
        return path.stat().st_mtime >= since
    except FileNotFoundError:
        return False


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


class BuildProgress:
    """A bar on a terminal; elsewhere a line now and then.

    Args:
        what: Name of what is built.
        total: Number of its rows.
    """

    def __init__(self, what: str, total: int) -> None:
        from rich.console import Console
        from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

        console = Console(stderr=True)
        self._what, self._total = what, total
        self._done, self._logged = 0, time.perf_counter()
        self._bar = Progress(
            *Progress.get_default_columns()[:-1], MofNCompleteColumn(), TimeRemainingColumn(), console=console
        )
        self._quiet = not console.is_terminal
        self._task = self._bar.add_task(what, total=total)

    def __enter__(self) -> BuildProgress:
        if not self._quiet:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self, rows: int) -> None:
        """Count finished rows."""
        self._done += rows
        self._bar.advance(self._task, rows)
        if self._quiet and time.perf_counter() - self._logged > 10:
            self._logged = time.perf_counter()
            logger.info(f"{self._what}: {self._done} of {self._total} rows")


def _await(path: Path, lock: Path, since: float, what: str, key: str) -> None:
    """Wait until local rank 0 of this node has made it.

    Raises:
        DataError: Neither it nor the lock of the process that makes it can be seen here.
    """
    started = time.monotonic()
    while not _is_there(path, since):
        if not lock.exists() and time.monotonic() - started > PATIENCE:
            raise DataError(
                f"rank {rank_word()} (local rank {this_launch().local_rank}) sees no {what} {path} and no process "
                f"building it; every process of a node must see the same {key} (working folder here: {os.getcwd()})"
            )
        time.sleep(0.2)


def _launch_time() -> float:
    """When this launch began: the start of the launcher (the parent process), in seconds since the epoch."""
    try:
        fields = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
        boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
        return int(boot.split()[1]) + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, StopIteration):
        return time.time()
