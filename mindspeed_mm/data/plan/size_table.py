"""Sizes of rows by number, in memory or in files that the processes of a node share."""

from __future__ import annotations

import json
import mmap
import os
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mindspeed_mm.data.media.media import SampleSize
from mindspeed_mm.utils.log import notice

NO_TOKENS = "no tokens"

#: rows of a part of the table, where their number isn't known, and at most
_PART_ROWS, _MOST_PART_ROWS = 1 << 16, 1 << 22
#: bytes of a row: patches and their squares int64, tokens and bucket int32
ROW_BYTES = 24
#: tokens + 1 and bucket + 1 are kept, so that 0 is unknown; this marks rows of several pieces or with a fault, whose
#: sizes are in a file of their own, at (start, length) in place of patches
_SPECIAL = -1
_SPECIAL_FILE = "special"


@dataclass(frozen=True)
class SampleSizes:
    """The sizes of the samples of several rows, in order: arrays of one number a sample, [samples] int64.

    Attributes:
        places: the place of the sample's row among the rows.
        pieces: its piece of the row.
        tokens, patches, squared_patches: as in `SampleSize`.
        faults: (place, reason) of the rows, or pieces of one, that give no sample.
    """

    places: np.ndarray
    pieces: np.ndarray
    tokens: np.ndarray
    patches: np.ndarray
    squared_patches: np.ndarray
    faults: Sequence[tuple[int, str]]


class _Part(NamedTuple):
    """A part of the table: media [rows, 2] int64, tokens and buckets [rows] int32."""

    media: np.ndarray
    tokens: np.ndarray
    buckets: np.ndarray


class SizeTable:
    """Sizes of rows, 24 bytes a row; grows as rows are found.

    Args:
        num_rows: Number of rows, if it is known.
        folder: Where processes share the table; None: it is in this process's memory.
    """

    def __init__(self, num_rows: int | None = None, folder: Path | None = None) -> None:
        wanted = _PART_ROWS if num_rows is None else 1 << max(10, (num_rows - 1).bit_length())
        self._part_rows = min(wanted, _MOST_PART_ROWS)
        self._folder = folder
        self._parts: dict[int, _Part] = {}
        self._special: dict[int, list[SampleSize]] = {}  # what isn't in the shared file
        self._order = threading.Lock()

    def __contains__(self, row: int) -> bool:
        return bool(self._part(row // self._part_rows).tokens[row % self._part_rows]) or row in self._special

    def unknown(self, rows: Sequence[int]) -> list[int]:
        """Return those of `rows` whose sizes aren't known, each once, in order."""
        known = self._kept(rows) != 0
        return list(dict.fromkeys(row for row, is_known in zip(rows, known.tolist(), strict=True) if not is_known))

    def __getitem__(self, row: int) -> list[SampleSize]:
        if row in self._special:
            return self._special[row]
        part, place = self._part(row // self._part_rows), row % self._part_rows
        kept = int(part.tokens[place])
        if kept == 0:
            raise KeyError(row)
        self._settle()
        if kept == _SPECIAL:
            return self._read(*part.media[place].tolist())
        patches, squared = part.media[place].tolist()
        bucket = int(part.buckets[place])
        return [SampleSize(kept - 1, patches, squared, bucket=bucket - 1 if bucket else None)]

    def __setitem__(self, row: int, sizes: list[SampleSize]) -> None:
        part, place = self._part(row // self._part_rows), row % self._part_rows
        if len(sizes) == 1 and sizes[0].fault is None:
            (size,) = sizes
            if size.patches or size.squared_patches:
                part.media[place] = size.patches, size.squared_patches
            if size.bucket is not None:
                part.buckets[place] = size.bucket + 1
            kept = size.tokens + 1
        elif (kept_at := self._append(sizes)) is None:
            self._special[row] = sizes
            return
        else:
            part.media[place] = kept_at
            kept = _SPECIAL
        self._settle()
        part.tokens[place] = kept

    def samples(self, rows: Sequence[int]) -> SampleSizes:
        """Return the sizes of the samples of known rows."""
        kept = self._kept(rows)
        self._settle()
        columns = np.zeros((len(rows), 5), dtype=np.int64)  # place, piece, tokens, patches, their squares
        columns[:, 0], columns[:, 2] = np.arange(len(rows)), kept - 1
        columns[:, 3:] = self._gathered(rows, "media")
        special = np.flatnonzero(kept == _SPECIAL).tolist()
        faults = [(place, NO_TOKENS) for place in np.flatnonzero(kept == 1).tolist()]
        if special:
            found = [(place, self[rows[place]]) for place in special]
            several = [
                (place, piece, size.tokens, size.patches, size.squared_patches)
                for place, sizes in found
                for piece, size in enumerate(sizes)
            ]
            columns = np.concatenate([columns[kept != _SPECIAL], np.array(several, np.int64).reshape(-1, 5)])
            columns = columns[np.argsort(columns[:, 0], kind="stable")]
            faults += [(place, size.fault or NO_TOKENS) for place, sizes in found for size in sizes if not size.tokens]
            faults.sort(key=lambda fault: fault[0])
        if faults:
            columns = columns[columns[:, 2] > 0]
        places, pieces, tokens, patches, squared = columns.T
        return SampleSizes(places, pieces, tokens, patches, squared, faults)

    def _kept(self, rows: Sequence[int]) -> np.ndarray:
        kept = self._gathered(rows, "tokens").astype(np.int64)
        if self._special:
            kept[[place for place, row in enumerate(rows) if row in self._special]] = _SPECIAL
        return kept

    def _gathered(self, rows: Sequence[int], column: str) -> np.ndarray:
        numbers, places = np.divmod(np.asarray(rows, dtype=np.int64), self._part_rows)
        parts = np.unique(numbers).tolist()
        if len(parts) == 1:
            return getattr(self._part(parts[0]), column)[places]
        found = np.zeros((len(rows), 2) if column == "media" else len(rows), dtype=np.int64)
        for number in parts:
            here = numbers == number
            found[here] = getattr(self._part(number), column)[places[here]]
        return found

    def _part(self, number: int) -> _Part:
        part = self._parts.get(number)
        if part is None:
            part = self._parts[number] = self._new_part(number)
        return part

    def _new_part(self, number: int) -> _Part:
        rows = self._part_rows
        content: np.ndarray = np.zeros(0, dtype=np.uint8)
        if self._folder is not None:
            try:
                content = np.frombuffer(_mapped(self._folder / f"{number}.sizes", rows * ROW_BYTES), dtype=np.uint8)
            except OSError as error:
                notice(f"{self._folder}: {error.strerror or error}; each process measures these rows for itself")
        if not len(content):
            content = np.zeros(rows * ROW_BYTES, dtype=np.uint8)
        media, tokens, buckets = np.split(content, [16 * rows, 20 * rows])
        return _Part(media.view(np.int64).reshape(rows, 2), tokens.view(np.int32), buckets.view(np.int32))

    def _append(self, sizes: list[SampleSize]) -> tuple[int, int] | None:
        """Append sizes to the shared file of special rows.

        Returns:
            Where they begin, and their length in bytes; None: there is no such file, or no space for it.
        """
        if self._folder is None:
            return None
        # most are the pieces of a text, for which a number will do
        written = [size.tokens if size == SampleSize(size.tokens) else asdict(size) for size in sizes]
        text = json.dumps(written).encode()
        try:
            file = os.open(self._folder / _SPECIAL_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                if os.write(file, text) < len(text):
                    return None
                return os.lseek(file, 0, os.SEEK_CUR) - len(text), len(text)
            finally:
                os.close(file)
        except OSError:
            return None

    def _read(self, start: int, length: int) -> list[SampleSize]:
        assert self._folder is not None
        with open(self._folder / _SPECIAL_FILE, "rb") as file:
            file.seek(start)
            read = json.loads(file.read(length))
        return [SampleSize(size) if isinstance(size, int) else SampleSize(**size) for size in read]

    def _settle(self) -> None:
        """Keep the order of memory accesses before and after, as other processors see it."""
        for _ in range(2):
            with self._order:
                pass


def _mapped(path: Path, size: int) -> mmap.mmap:
    """Map a file of zeros that all processes share; its space is reserved, so that writing to it can't fail later."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(file, 0, size)
        return mmap.mmap(file, size)
    finally:
        os.close(file)
