"""One data file as rows: opened by its content, read a row at a time, found as far as they are asked for."""

from __future__ import annotations

import array
import json
import os
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from mindspeed_mm.data.json_rows import RowBounds, find_lines, find_objects, json_shape
from mindspeed_mm.utils.errors import BadSample, DataError

_READ_AHEAD = 4 << 20
_COMPRESSED = {b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2"}
BAD_ROW = "a row can't be read"


class RowFile(Protocol):
    """One data file. Instances can be pickled and forked; they open the file when a row is asked for."""

    path: str

    def __len__(self) -> int:
        """Number of rows; finds all of them."""

    def has(self, index: int) -> bool:
        """Whether there is a row `index`; rows are looked for as far as that needs."""

    def row(self, index: int) -> dict[str, Any]:
        """Return row `index`. Raises BadSample with its place if it can't be read."""

    def head(self, limit: int) -> Iterator[dict[str, Any] | BadSample]:
        """Yield the first `limit` rows, faster than one by one; for a row that can't be read what `row` raises."""

    def where(self, index: int) -> str:
        """Say for a person which row this is, counted from 1."""


class TextFile:
    """Rows that lie one after the other in a text file, parsed when asked for; holds two integers a row.

    Rows are found a chunk of the file at a time, as far as they are asked for. Subclasses find and parse them.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._starts, self._ends = array.array("q"), array.array("q")
        self._position: int | None = 0  # where the search goes on; None: all rows have been found
        self._descriptor: int | None = None

    def _find(self, position: int) -> tuple[RowBounds, int | None] | None:
        """Find the next rows from a position on: (bounds, where to go on); None if there is nothing more.

        The search keeps no open file, so that forked and pickled copies go on each by itself.
        """
        raise NotImplementedError

    def _parse(self, text: bytes, index: int) -> dict[str, Any]:
        """Return the row that stands in `text`. Raises BadSample."""
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
        while self._position is not None:
            self._find_more(self._position)
        return len(self._starts)

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
        """Say which row this is, by line."""
        line, left = 1, self._starts[index]
        with open(self.path, "rb") as file:
            while left > 0:
                block = file.read(min(left, _READ_AHEAD))
                line, left = line + block.count(b"\n"), left - len(block)
        return f"{self.path}, line {line} (row {index + 1})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_descriptor": None}

    def __del__(self) -> None:
        descriptor = getattr(self, "_descriptor", None)
        if descriptor is not None and os is not None:  # None: the interpreter is ending, and has closed it
            os.close(descriptor)


class JsonFile(TextFile):
    """Rows of a json or jsonl file: one object a line, an array of objects, or objects one after the other."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        shape = json_shape(path)
        if shape is None:
            raise DataError(f"{path}: expected JSON rows")
        self._shape = shape
        self._position = shape.begin

    def _find(self, position: int) -> tuple[RowBounds, int | None] | None:
        return find_lines(self.path, position) if self._shape.by_line else (find_objects(self.path, self._shape), None)

    def where(self, index: int) -> str:
        """Say which row this is: by line where rows are lines."""
        return super().where(index) if self._shape.by_line else f"{self.path}, row {index + 1}"

    def _parse(self, text: bytes, index: int) -> dict[str, Any]:
        try:
            value = json.loads(text.decode("utf-8"))
        except UnicodeDecodeError as error:
            what = f"not UTF-8 ({error.reason} at byte {error.start} of the row)"
            raise BadSample(f"{self.where(index)}: {what}", BAD_ROW) from None
        except ValueError as error:
            raise BadSample(f"{self.where(index)}: not valid JSON: {error}; found {text[:60]!r}", BAD_ROW) from None
        if not isinstance(value, dict):
            found = f"expected an object, found {type(value).__name__} {text[:60]!r}"
            raise BadSample(f"{self.where(index)}: {found}", BAD_ROW)
        return value


def open_rows(path: str) -> RowFile:
    """Open a data file by what it holds; its suffix isn't believed.

    Raises:
        DataError: Unreadable or unknown content.
    """
    from mindspeed_mm.data.csv_file import CsvFile
    from mindspeed_mm.data.table_files import ArrowFile, ParquetFile, is_arrow_stream

    try:
        with open(path, "rb") as file:
            magic = file.read(16)
    except OSError as error:
        raise DataError(f"{path}: can't be opened: {error.strerror or error}") from None
    if magic.startswith(b"PAR1"):
        return ParquetFile(path)
    if magic.startswith(b"ARROW1") or is_arrow_stream(magic):
        return ArrowFile(path)
    for signature, name in _COMPRESSED.items():
        if magic.startswith(signature):
            raise DataError(
                f"{path}: this is a {name} file; expected json, jsonl, csv, parquet or arrow, not compressed"
            )
    return CsvFile(path) if json_shape(path) is None else JsonFile(path)
