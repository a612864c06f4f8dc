"""Rows of a csv file: a header, then records with quoted fields that may have line breaks."""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np

from mindspeed_mm.data.sources.json_rows import RowBounds
from mindspeed_mm.data.sources.text_rows import BAD_ROW, TextFile
from mindspeed_mm.utils.errors import BadSample, DataError

_DELIMITERS = (",", ";", "\t")
_BATCH = 4096
_BOM = b"\xef\xbb\xbf"


class CsvFile(TextFile):
    """Rows of a csv file as objects of texts; an empty field is an empty text.

    The delimiter (comma, semicolon or tab) is the most frequent one in the header.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
        with open(path, "rb") as file:
            file.seek(3 if file.read(3) == _BOM else 0)
            begin = file.tell()
            lines = _Lines(file)
            outside = re.sub(r'"[^"]*"', "", _first_line(file, path))
            file.seek(begin)
            self._delimiter = max(_DELIMITERS, key=outside.count)
            header = next(csv.reader(lines, delimiter=self._delimiter), [])
            self._position = begin + lines.size
        self._names = [name.encode("latin-1").decode("utf-8", "replace").strip() for name in header]
        if not _is_header(self._names):
            raise DataError(
                f"{path}: expected JSON objects (one a line, or in an array), csv with a header line, parquet or "
                f"arrow, found a file that starts with {(','.join(header))[:20]!r}"
            )

    def _find(self, position: int) -> tuple[RowBounds, int | None] | None:
        starts, ends, start = [], [], position
        with open(self.path, "rb") as file:
            file.seek(position)
            lines = _Lines(file)
            try:
                for record in csv.reader(lines, delimiter=self._delimiter):
                    end = position + lines.size
                    if record:  # a blank line is no row
                        starts.append(start)
                        ends.append(end)
                    start = end
                    if len(starts) == _BATCH:
                        break
            except csv.Error as error:
                raise DataError(f"{self.path}: after byte {start}: not a csv record: {error}") from None
        return (RowBounds(np.array(starts), np.array(ends)), start) if start > position else None

    def _parse(self, text: bytes, index: int) -> dict[str, Any]:
        try:
            decoded = text.decode("utf-8")
        except UnicodeDecodeError as error:
            what = f"not UTF-8 ({error.reason} at byte {error.start} of the row)"
            raise BadSample(f"{self.where(index)}: {what}", BAD_ROW) from None
        record = next(csv.reader(io.StringIO(decoded, newline=""), delimiter=self._delimiter), [])
        if len(record) != len(self._names):
            raise BadSample(
                f"{self.where(index)}: expected {len(self._names)} fields ({', '.join(self._names)}), "
                f"found {len(record)}: {decoded[:60]!r}",
                BAD_ROW,
            )
        return dict(zip(self._names, record, strict=True))


class _Lines:
    """The lines of a file as text, one character per byte; counts the bytes that have been read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size = 0

    def __iter__(self) -> Iterator[str]:
        for line in self._file:
            self.size += len(line)
            yield line.decode("latin-1")


def _first_line(file: BinaryIO, path: str) -> str:
    line = file.readline(1 << 16)
    if b"\x00" in line:
        raise DataError(
            f"{path}: expected json, jsonl, csv, parquet or arrow, found a file that starts with {line[:20]!r}"
        )
    return line.decode("latin-1")


def _is_header(names: list[str]) -> bool:
    """Whether a first record can be a header: several names, or a single word, none of them empty or repeated."""
    plain = all(re.fullmatch(r"[^<>{}\[\]\r\n]{1,80}", name) for name in names)
    single = len(names) > 1 or (len(names) == 1 and re.fullmatch(r"[\w.-]+", names[0]) is not None)
    return plain and single and len(set(names)) == len(names)
