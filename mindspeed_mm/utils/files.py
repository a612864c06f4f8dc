"""Files that are whole or not there."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any


def fsync_path(path: str | Path) -> None:
    """Force a file's or folder's content to disk (folders: where the system can)."""
    fd = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(fd)
    finally:
        os.close(fd)


def fsync_tree(root: Path, *, files: bool = True) -> None:
    """Force a folder's entries (and, with `files`, its files' content) to disk."""
    if files:
        for path in root.rglob("*"):
            if path.is_file():
                fsync_path(path)
    fsync_path(root)


def replace_file(path: Path, text: str) -> None:
    """Write `text` to `path` atomically and durably: readers see the old content or the new."""
    working = path.with_name(f".{path.name}.tmp")
    with open(working, "w", encoding="utf-8") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(working, path)
    fsync_path(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON atomically and durably."""
    replace_file(path, json.dumps(value, ensure_ascii=False, indent=1) + "\n")
