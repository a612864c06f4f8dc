"""Atomic and durable writing of files, and questions about paths."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import uuid
from pathlib import Path
from typing import Any

from mindspeed_mm.utils.errors import ConfigError

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def fsync_path(path: str | Path) -> None:
    """Force a file's or folder's content to disk (folders: where the system can).

    Raises:
        OSError: a file's content can't be stored: some file systems report only here that they are full.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError) if os.path.isdir(path) else contextlib.nullcontext():
            os.fsync(fd)
    finally:
        os.close(fd)


def replace_file(path: Path, text: str) -> None:
    """Write `text` to `path` atomically and durably: readers see the old content or the new."""
    working = working_file(path)
    try:
        with open(working, "w", encoding="utf-8") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.replace(working, path)
    except OSError:
        working.unlink(missing_ok=True)
        raise
    fsync_path(path.parent)


def refuse_unwritable(folder: str | Path, flag: str) -> None:
    """Check that a folder can be written, before work whose result is written there.

    Nothing is left behind: a file is created and removed in the folder, or in the nearest one above it that exists.

    Args:
        folder: the folder, which need not exist.
        flag: the flag that names it, for the error.

    Raises:
        ConfigError: its path isn't a folder, or no file can be created there.
    """
    wanted = Path(os.path.abspath(folder))
    place = next(path for path in (wanted, *wanted.parents) if os.path.lexists(path))
    sentence = f"{flag} '{folder}' can't be written"
    if not place.is_dir():
        what = "a link to nothing" if place.is_symlink() and not place.exists() else "a file"
        raise ConfigError(f"{sentence}: '{place}' is {what}, expected a folder; remove it, or give another {flag}")
    probe = place / f".writable.{uuid.uuid4().hex}"
    try:
        with open(probe, "wb") as file:
            file.write(b"\0" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        advice = "free some space there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "have it made writable"
        raise ConfigError(
            f"{sentence}: no file can be made in '{place}' ({error.strerror}); {advice}, or give another {flag}"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()


def working_file(path: Path) -> Path:
    """Return the hidden file in which `replace_file` writes the new content of `path`."""
    return path.with_name(f".{path.name}.tmp")


def is_same_path(one: str | Path, other: str | Path) -> bool:
    """Whether two paths, existing or not, are the same place."""
    return os.path.realpath(one) == os.path.realpath(other)


def is_inside(path: str | Path, folder: str | Path) -> bool:
    """Whether `path` is `folder` or is inside it; neither needs to exist."""
    place, root = os.path.realpath(path), os.path.realpath(folder)
    return os.path.commonpath([place, root]) == root


def exchange(one: Path, other: Path) -> bool:
    """Swap the content of two paths in one atomic step; return False where the system can't.

    Source: Linux's renameat2 with RENAME_EXCHANGE (ext4, xfs, btrfs, tmpfs; not NFS).
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    return rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0


def read_object(path: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds; {}: it holds none that can be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def write_json(path: Path, value: object) -> None:
    """Write `value` as JSON atomically and durably."""
    replace_file(path, json.dumps(value, ensure_ascii=False, indent=1) + "\n")
