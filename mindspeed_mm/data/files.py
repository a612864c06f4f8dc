"""Data files as rows: opened by content, read a row at a time, with the name of each row for error messages."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mindspeed_mm.data.json_rows import find_rows
from mindspeed_mm.utils.errors import DataError, did_you_mean

_READ_AHEAD = 4 << 20
_OTHER_SIGNATURES = {b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip", b"\x28\xb5\x2f\xfd": "zstd", b"ARROW1": "Arrow"}


class RowFile(Protocol):
    """One data file. Instances can be pickled and forked; they open the file when a row is asked for."""

    path: str

    def __len__(self) -> int:
        """Number of rows."""

    def row(self, index: int) -> dict[str, Any]:
        """Return row `index`. Raises DataError with its place if it isn't a JSON object."""

    def head(self, limit: int) -> Iterator[dict[str, Any]]:
        """Yield the first `limit` rows, faster than one by one."""

    def where(self, index: int) -> str:
        """Say for a person which row this is, counted from 1."""


class JsonFile:
    """Rows of a json or jsonl file, parsed when asked for; holds two integers a row."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._bounds = find_rows(path)
        self._descriptor: int | None = None

    def __len__(self) -> int:
        return len(self._bounds.starts)

    def row(self, index: int) -> dict[str, Any]:
        """Return row `index`."""
        start, end = int(self._bounds.starts[index]), int(self._bounds.ends[index])
        if self._descriptor is None:
            self._descriptor = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        # pread keeps no position, so that forked workers may share the descriptor.
        return self._parse(os.pread(self._descriptor, end - start, start), index)

    def head(self, limit: int) -> Iterator[dict[str, Any]]:
        """Yield the first `limit` rows."""
        starts, ends = self._bounds.starts, self._bounds.ends
        count, first = min(limit, len(self)), 0
        with open(self.path, "rb") as file:
            while first < count:
                base = int(starts[first])
                last = max(first + 1, int(np.searchsorted(ends[:count], base + _READ_AHEAD, side="right")))
                file.seek(base)
                block = file.read(int(ends[last - 1]) - base)
                for index in range(first, last):
                    yield self._parse(block[int(starts[index]) - base : int(ends[index]) - base], index)
                first = last

    def where(self, index: int) -> str:
        """Say which row this is: by line where rows are lines."""
        if not self._bounds.by_line:
            return f"{self.path}, row {index + 1}"
        line, left = 1, int(self._bounds.starts[index])
        with open(self.path, "rb") as file:
            while left > 0:
                block = file.read(min(left, _READ_AHEAD))
                line, left = line + block.count(b"\n"), left - len(block)
        return f"{self.path}, line {line} (row {index + 1})"

    def _parse(self, text: bytes, index: int) -> dict[str, Any]:
        try:
            value = json.loads(text.decode("utf-8"))
        except UnicodeDecodeError as error:
            what = f"not UTF-8 ({error.reason} at byte {error.start} of the row)"
            raise DataError(f"{self.where(index)}: {what}") from None
        except ValueError as error:
            raise DataError(f"{self.where(index)}: not valid JSON: {error}; found {text[:60]!r}") from None
        if not isinstance(value, dict):
            raise DataError(f"{self.where(index)}: expected an object, found {type(value).__name__} {text[:60]!r}")
        return value

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_descriptor": None}

    def __del__(self) -> None:
        descriptor = getattr(self, "_descriptor", None)
        if descriptor is not None:
            os.close(descriptor)


class ParquetFile:
    """Rows of a parquet file, held once as an Arrow table (which forked workers share)."""

    def __init__(self, path: str) -> None:
        import pyarrow.parquet as parquet

        self.path = path
        try:
            self._length = parquet.ParquetFile(path).metadata.num_rows
        except Exception as error:  # pyarrow's own error classes vary by version
            raise DataError(f"{path}: starts like a parquet file but can't be read as one: {error}") from None
        self._table: Any = None

    def __len__(self) -> int:
        return self._length

    def _rows(self) -> Any:
        if self._table is None:
            import pyarrow.parquet as parquet

            self._table = parquet.read_table(self.path, memory_map=True)
        return self._table

    def row(self, index: int) -> dict[str, Any]:
        """Return row `index`."""
        return self._rows().slice(index, 1).to_pylist()[0]

    def head(self, limit: int) -> Iterator[dict[str, Any]]:
        """Yield the first `limit` rows."""
        for batch in self._rows().slice(0, limit).to_batches(max_chunksize=1000):
            yield from batch.to_pylist()

    def where(self, index: int) -> str:
        """Say which row this is."""
        return f"{self.path}, row {index + 1}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_table": None}


def open_rows(path: str) -> RowFile:
    """Open a data file by what it holds; its suffix isn't believed.

    Raises:
        DataError: Unreadable or unknown content.
    """
    try:
        with open(path, "rb") as file:
            magic = file.read(6)
    except OSError as error:
        raise DataError(f"{path}: can't be opened: {error.strerror or error}") from None
    if magic[:4] == b"PAR1":
        return ParquetFile(path)
    for signature, name in _OTHER_SIGNATURES.items():
        if magic.startswith(signature):
            raise DataError(f"{path}: this is a {name} file; expected json, jsonl or parquet, not compressed")
    return JsonFile(path)


def locate_file(name: str, folder: str) -> str:
    """Return the path of a data file: `folder/name` if that exists, else `name` as given.

    Raises:
        DataError: Neither exists; the message has the path and the nearest file beside it.
    """
    joined = os.path.join(folder, name)
    for candidate in (joined, name):
        if os.path.isfile(candidate):
            return candidate
    for candidate in (joined, name):
        if os.path.isdir(candidate):
            raise DataError(f"{candidate}: expected a file, found a folder; name its files, comma separated")
    near = ""
    for candidate in (joined, name):
        parent = Path(candidate).parent
        if parent.is_dir():
            near = near or did_you_mean(Path(name).name, (entry.name for entry in parent.iterdir()))
    tried = joined if os.path.abspath(joined) == os.path.abspath(name) else f"{joined}, {name}"
    raise DataError(f"data file not found: {tried} (working folder {os.getcwd()}){near}")


class RowSource:
    """The rows of several files, one after the other.

    Args:
        paths: Data files, in order.
        limit: Upper bound on the rows taken of each file; None takes all.
    """

    def __init__(self, paths: Sequence[str], limit: int | None = None) -> None:
        self.files = [open_rows(path) for path in paths]
        sizes = [len(file) if limit is None else min(limit, len(file)) for file in self.files]
        self.offsets = np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
        if not len(self):
            raise DataError(f"no rows in {', '.join(paths)}")

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def _locate(self, index: int) -> tuple[RowFile, int]:
        number = int(np.searchsorted(self.offsets, index, side="right")) - 1
        return self.files[number], index - int(self.offsets[number])

    def row(self, index: int) -> dict[str, Any]:
        """Return row `index` of all rows."""
        file, local = self._locate(index)
        return file.row(local)

    def where(self, index: int) -> str:
        """Name the file and the row, for messages."""
        file, local = self._locate(index)
        return file.where(local)

    def folder(self, index: int) -> str:
        """Folder of the file that holds row `index`."""
        return os.path.dirname(self._locate(index)[0].path)

    def heads(self, limit: int) -> Iterator[tuple[str, Iterator[tuple[int, dict[str, Any]]]]]:
        """Yield, for each file, its path and its first `limit` rows as (index among all rows, row)."""
        for number, file in enumerate(self.files):
            low, high = int(self.offsets[number]), int(self.offsets[number + 1])
            yield file.path, enumerate(file.head(min(limit, high - low)), start=low)


@dataclass(frozen=True)
class Place:
    """The name of a row for messages; worked out only when a message needs it."""

    source: RowSource
    index: int

    def __str__(self) -> str:
        return self.source.where(self.index)
