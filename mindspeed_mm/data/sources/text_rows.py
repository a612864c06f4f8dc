"""The protocol of data files, whose rows are found as far as they are read, and the base class of text files."""

from __future__ import annotations

import array
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mindspeed_mm.data.sources.json_rows import RowBounds
from mindspeed_mm.utils.errors import BadSample
from mindspeed_mm.utils.node_folder import NodeFolder

_READ_AHEAD = 4 << 20
#: bytes of a file from which on the processes of a node share the places of its rows
_SHARED_BYTES = 8 << 20
BAD_ROW = "a row can't be read"


class RowFile(Protocol):
    """One data file. Instances can be pickled and forked; they open the file when a row is asked for."""

    path: str

    def __len__(self) -> int:
        """Number of rows; finds all of them."""

    def has(self, index: int) -> bool:
        """Whether there is a row `index`; rows are searched up to it."""

    def row(self, index: int) -> dict[str, Any]:
        """Return row `index`. Raises BadSample with its place if it can't be read."""

    def head(self, limit: int) -> Iterator[dict[str, Any] | BadSample]:
        """Yield the first `limit` rows, faster than one by one; for a row that can't be read the error of `row`."""

    def where(self, index: int) -> str:
        """Name a row for messages, counted from 1."""


class TextFile:
    """Rows one after the other in a text file, parsed when they are read; two integers are kept per row.

    Rows are found a chunk of the file at a time, as far as they are read. Subclasses find and parse them.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._starts: Any = array.array("q")  # or mapped: [rows] int64
        self._ends: Any = array.array("q")
        self._folder: NodeFolder | None = None  # where they are mapped from
        self._position: int | None = 0  # where the search continues; None: all rows have been found
        self._descriptor: int | None = None

    def _find(self, position: int) -> tuple[RowBounds, int | None] | None:
        """Find the next rows from a position on: (bounds, next position); None at the end.

        The search keeps no open file, so that forked and pickled copies continue independently.
        """
        raise NotImplementedError

    def _parse(self, text: bytes, index: int) -> dict[str, Any]:
        """Return the row in `text`. Raises BadSample."""
        raise NotImplementedError

    def has(self, index: int) -> bool:
        """Whether there is a row `index`."""
        while index >= len(self._starts) and self._position is not None:
            self._find_more(self._position)
        return 0 <= index < len(self._starts)

    def _find_more(self, position: int) -> None:
        found = self._find(position)
        if found is None:
            self._position = None
            return
        bounds, self._position = found
        self._starts.frombytes(bounds.starts.astype(np.int64).tobytes())
        self._ends.frombytes(bounds.ends.astype(np.int64).tobytes())

    def __len__(self) -> int:
        if self._position is not None and os.path.getsize(self.path) >= _SHARED_BYTES:
            self._share_bounds()
        while self._position is not None:
            self._find_more(self._position)
        return len(self._starts)

    def _share_bounds(self) -> None:
        """Find all rows, or take what another process of the node has found; one copy is mapped into all of them."""
        status = os.stat(self.path)
        version = type(self).__qualname__, os.path.abspath(self.path), status.st_size, status.st_mtime_ns
        folder = NodeFolder.open(f"rows-{hashlib.sha256(repr(version).encode()).hexdigest()[:16]}")
        if folder is None:
            return
        try:
            bounds = np.memmap(folder.once("bounds", self._write_bounds), dtype=np.int64, mode="r")
        except (OSError, ValueError):  # no space for them, or no rows
            folder.close()
            return
        self._starts, self._ends = np.asarray(bounds).reshape(2, -1)
        self._position, self._folder = None, folder

    def _write_bounds(self, path: Path) -> None:
        while self._position is not None:
            self._find_more(self._position)
        with open(path, "wb") as file:
            file.write(self._starts)
            file.write(self._ends)

    def row(self, index: int) -> dict[str, Any]:
        """Return row `index`."""
        if not self.has(index):
            raise IndexError(f"{self.path}: row {index + 1} of {len(self._starts)}")
        start, end = self._starts[index], self._ends[index]
        if self._descriptor is None:
            self._descriptor = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        # pread keeps no position, so that forked workers may share the descriptor.
        return self._parse(os.pread(self._descriptor, end - start, start), index)

    def head(self, limit: int) -> Iterator[dict[str, Any] | BadSample]:
        """Yield the first `limit` rows."""
        first = 0
        with open(self.path, "rb") as file:
            while first < limit and self.has(first):
                base, last = self._starts[first], first + 1
                while last < min(limit, len(self._ends)) and self._ends[last] <= base + _READ_AHEAD:
                    last += 1
                file.seek(base)
                block = file.read(self._ends[last - 1] - base)
                for index in range(first, last):
                    try:
                        yield self._parse(block[self._starts[index] - base : self._ends[index] - base], index)
                    except BadSample as error:
                        yield error
                first = last

    def where(self, index: int) -> str:
        """Name a row, with its line."""
        line, left = 1, self._starts[index]
        with open(self.path, "rb") as file:
            while left > 0:
                block = file.read(min(left, _READ_AHEAD))
                line, left = line + block.count(b"\n"), left - len(block)
        return f"{self.path}, line {line} (row {index + 1})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_descriptor": None, "_folder": None}

    def __del__(self) -> None:
        descriptor = getattr(self, "_descriptor", None)
        if descriptor is not None and os is not None:  # None: the interpreter is ending, and has closed it
            os.close(descriptor)
