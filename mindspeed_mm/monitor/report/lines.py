"""Files of JSON objects, one a line, as a run writes them: growing, and perhaps torn at their end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

Item = TypeVar("Item")
_READ_BYTES = 1 << 20


class LinesReader:
    """Reads what a file has gained since the last time."""

    def __init__(self, path: Path) -> None:
        """
        Args:
            path: the file, which need not exist yet.
        """
        self.path = path
        self._offset = 0
        self._file: int | None = None  # its number in the file system

    def was_replaced(self) -> bool:
        """Whether the file isn't the one that was read so far, or has lost lines; it is then read from its start."""
        try:
            now = self.path.stat()
        except OSError:
            return False
        replaced = self._file is not None and (now.st_ino != self._file or now.st_size < self._offset)
        if replaced:
            self._offset = 0
        self._file = now.st_ino
        return replaced

    def new(self) -> Iterator[dict[str, Any]]:
        """Yield the objects of whole new lines; lines that are none are passed over."""
        try:
            file = open(self.path, "rb")  # noqa: SIM115  (closed below)
        except OSError:
            return
        with file:
            file.seek(self._offset)
            rest = b""
            while block := file.read(_READ_BYTES):
                *lines, rest = (rest + block).split(b"\n")
                for line in lines:
                    self._offset += len(line) + 1
                    found = _object(line)
                    if found is not None:
                        yield found


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of all whole lines of a file; []: it can't be read."""
    return list(LinesReader(path).new())


def evenly_spread(items: Sequence[Item], most: int) -> list[Item]:
    """Return at most so many of the items, evenly chosen, with the first and the last one; of one, the last."""
    if len(items) <= most:
        return list(items)
    if most == 1:
        return [items[-1]]
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
