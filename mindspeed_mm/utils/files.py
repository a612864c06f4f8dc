"""Files that are whole or not there."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
from pathlib import Path
from typing import Any

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def fsync_path(path: str | Path) -> None:
    """Force a file's or folder's content to disk (folders: where the system can).

    Raises:
        OSError: a file's content can't be kept: some file systems find out only now that they are full.
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


def working_file(path: Path) -> Path:
    """The hidden file in which `replace_file` writes the new content of `path`."""
    return path.with_name(f".{path.name}.tmp")


def is_same_path(one: str | Path, other: str | Path) -> bool:
    """Whether two paths, there or not, name the same place."""
    return os.path.realpath(one) == os.path.realpath(other)


def is_inside(path: str | Path, folder: str | Path) -> bool:
    """Whether `path` is `folder` or lies somewhere in it; neither needs to be there."""
    place, root = os.path.realpath(path), os.path.realpath(folder)
    return os.path.commonpath([place, root]) == root


def exchange(one: Path, other: Path) -> bool:
    """Let two paths swap their content in one atomic step; False where the system or the file system can't.

    Source: Linux's renameat2 with RENAME_EXCHANGE (ext4, xfs, btrfs, tmpfs; not NFS).
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    return rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON atomically and durably."""
    replace_file(path, json.dumps(value, ensure_ascii=False, indent=1) + "\n")
