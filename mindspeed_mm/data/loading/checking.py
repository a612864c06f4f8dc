"""Check the first rows before a run: find faults, and leave out rows without a target."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from mindspeed_mm.data.conversation.records import RecordReader
from mindspeed_mm.data.media.media_files import find_media
from mindspeed_mm.data.places import Place
from mindspeed_mm.data.sources.files import RowSource
from mindspeed_mm.data.sources.text_rows import RowFile
from mindspeed_mm.utils.errors import BadSample, DataError
from mindspeed_mm.utils.log import info_rank0, notice

# How many rows of a file are read at the start, to find faults and rows without a target; the others are checked when
# they are used. Bounded, so that a run starts in seconds on files of any size.
CHECKED_ROWS = 20_000
CHECKED_ROWS_OF_STREAM = 1_000
NO_TARGET = "no turn of the assistant to train on"
_ROWS_FOR_COLUMNS = 100
_ROWS_FOR_MEDIA = 16


class LeftOut:
    """Rows that aren't used, counted by reason."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self._counts: Counter[str] = Counter()
        self._first: dict[str, object] = {}

    def add(self, row: int, reason: str, first: object) -> None:
        """Leave out a row; `first` is quoted for it if it is the first one with that reason."""
        self.rows.append(row)
        self._counts[reason] += 1
        self._first.setdefault(reason, first)

    def __str__(self) -> str:
        return ", ".join(
            f"{count} × {reason} (first: {self._first[reason]})" for reason, count in self._counts.most_common()
        )


def check_rows(source: RowSource, skip: bool) -> np.ndarray:
    """Read the first rows of each file: find faults before a run starts, and leave out rows without a target.

    Args:
        source: The rows.
        skip: Leave out rows with faults, too; else the first one is raised.

    Returns:
        Numbers of the rows to use, [rows] int64; empty for a stream, whose rows are checked when they are read.

    Raises:
        BadSample: A row can't be used; the message names it and its fault.
        DataError: A column is missing, or no row is left.
    """
    left_out = LeftOut()
    limit = CHECKED_ROWS_OF_STREAM if source.lazy else CHECKED_ROWS
    begins = itertools.repeat(0) if source.lazy else source.offsets.tolist()
    for begin, number in zip(begins, range(len(source.files)), strict=False):
        file, reader, rows = source.head(number, limit)
        first = list(itertools.islice(rows, _ROWS_FOR_COLUMNS))
        columns = set().union(*(row for _, row in first if isinstance(row, dict)))
        if columns:
            reader.check_columns(columns, file.path)
        for name in reader.unused_columns(columns):
            notice(f"{file.path}: column '{name}' isn't used; to use it, name it in dataset_param.attr.{name}")
        folders = source.folders_of(number)
        for local, row in itertools.chain(first, rows):
            try:
                _check(row, file, reader, local, folders)
            except BadSample as error:
                if error.reason != NO_TARGET and not skip:
                    raise
                left_out.add(begin + local, error.reason, Place(file, local) if error.reason == NO_TARGET else error)
    return np.zeros(0, dtype=np.int64) if source.lazy else _all_but(source, left_out)


def _check(
    row: Mapping[str, Any] | BadSample, file: RowFile, reader: RecordReader, local: int, folders: tuple[str, ...]
) -> None:
    if isinstance(row, BadSample):
        raise row
    where = Place(file, local)
    conversation = reader.read(row, where)
    if not conversation.has_target:
        raise BadSample(f"{where}: {NO_TARGET}", NO_TARGET)
    for ref in conversation.media if local < _ROWS_FOR_MEDIA else ():
        for medium in ref.frames or (ref,):
            if medium.content is None:
                find_media(medium, folders, where)


def _all_but(source: RowSource, left_out: LeftOut) -> np.ndarray:
    keep = np.ones(len(source), dtype=bool)
    keep[left_out.rows] = False
    if not keep.any():
        raise DataError(f"none of the {len(source)} rows can be used: {left_out}")
    if left_out.rows:
        info_rank0(f"left out {len(left_out.rows)} of {len(source)} rows: {left_out}")
    return np.flatnonzero(keep)
