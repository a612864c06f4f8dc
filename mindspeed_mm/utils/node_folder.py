"""A folder in which the processes of a node share what they find out; it is there as long as one of them uses it."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import uuid
import weakref
from collections.abc import Callable
from pathlib import Path

from mindspeed_mm.utils.log import notice

try:
    import fcntl
except ImportError:  # not on this system
    fcntl = None  # type: ignore[assignment]

_USERS, _PREFIX = "users", "mindspeed_mm"


class NodeFolder:
    """A folder in the node's memory, or else its folder for temporary files.

    Whoever uses it holds a shared lock on a file in it, which ends with the process, however that ends: the last one
    removes the folder, and so does the next run with what a killed one has left.

    Args:
        path: The folder.
        users: Descriptor of the locked file.

    Raises:
        OSError: No file can be made in it.
    """

    def __init__(self, path: Path, users: int) -> None:
        self.path = path
        self._rows = os.open(path / "rows", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._release = weakref.finalize(self, _leave, path, users, self._rows, os.getpid())

    @classmethod
    def open(cls, key: str | None, size: int = 0) -> NodeFolder | None:
        """Return the folder of a name, which is made where no process uses it, and is empty then.

        Args:
            key: Name that all processes know; None: a folder of this process and those that are forked from it.
            size: Bytes that it will hold; a place with less than twice as many left is passed over.

        Returns:
            The folder; None where there is no place for it.
        """
        if fcntl is None:
            return None
        prefix = f"{_PREFIX}-{os.getuid()}-"
        name = prefix + (key or uuid.uuid4().hex)
        for base in sorted(cls._places(), key=lambda base: not (base / name).exists()):
            try:
                path = base / name
                _remove_unused(base, prefix, path)
                space = os.statvfs(base)
                if not path.exists() and space.f_bavail * space.f_frsize < 2 * size:
                    continue
                return cls(path, _use(path))
            except OSError:
                continue
        places = " or ".join(map(str, cls._places()))
        notice(
            f"no folder for {size} bytes can be made in {places}: processes of this node share nothing of what they "
            "find in the data"
        )
        return None

    @staticmethod
    def _places() -> list[Path]:
        return list(dict.fromkeys((Path("/dev/shm"), Path(tempfile.gettempdir()))))

    def close(self) -> None:
        """Leave the folder; the last process removes it."""
        self._release()

    def once(self, name: str, make: Callable[[Path], None]) -> Path:
        """Return a file of the folder, which one process makes and the others wait for.

        Args:
            name: The file.
            make: Writes it under the path that it is given. If the process that makes it ends, another one does.
        """
        path = self.path / name
        while not path.exists():
            if not self.try_lock(0):
                time.sleep(0.01)
                continue
            try:
                if not path.exists():
                    working = self.path / f"{name}.tmp"
                    make(working)
                    working.rename(path)
            finally:
                self.unlock(0)
        return path

    def try_lock(self, row: int) -> bool:
        """Lock a number, unless another process has locked it; the lock ends with the process."""
        try:
            fcntl.lockf(self._rows, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, row)
        except OSError:
            return False
        return True

    def unlock(self, row: int) -> None:
        """Free a number that this process has locked."""
        fcntl.lockf(self._rows, fcntl.LOCK_UN, 1, row)


def _use(path: Path) -> int:
    """Make a folder, and lock the file of its users; what is in it goes if there was none."""
    while True:
        path.mkdir(mode=0o700, exist_ok=True)
        if path.stat().st_uid != os.getuid():
            raise PermissionError(f"{path} is another user's")
        try:
            users = os.open(path / _USERS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # removed since it was made
            continue
        if _is_unused(users):
            for left in path.iterdir():
                if left.name != _USERS:
                    left.unlink()
        fcntl.flock(users, fcntl.LOCK_SH)
        try:
            if (path / _USERS).stat().st_ino == os.fstat(users).st_ino:
                return users
        except FileNotFoundError:
            pass
        os.close(users)


def _is_unused(users: int) -> bool:
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove_unused(base: Path, name: str, wanted: Path) -> None:
    """Remove the folders that killed processes have left."""
    for path in base.glob(f"{name}*"):
        if path == wanted:
            continue
        try:
            users = os.open(path / _USERS, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        if _is_unused(users):
            shutil.rmtree(path, ignore_errors=True)
        os.close(users)


def _leave(path: Path, users: int, rows: int, process: int) -> None:
    if os.getpid() != process:  # a forked copy of the object
        return
    if _is_unused(users):
        shutil.rmtree(path, ignore_errors=True)
    os.close(users)
    os.close(rows)
