"""The rows of all data files of a run: numbered, named for messages, and read as conversations."""

from __future__ import annotations

import itertools
import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mindspeed_mm.configs.data_config import DatasetAttr
from mindspeed_mm.data.conversation.messages import Conversation
from mindspeed_mm.data.conversation.records import RecordReader
from mindspeed_mm.data.places import Place
from mindspeed_mm.data.sources.mixing import Mixture
from mindspeed_mm.data.sources.row_files import open_rows
from mindspeed_mm.data.sources.text_rows import RowFile
from mindspeed_mm.utils.errors import BadSample, DataError


@dataclass(frozen=True)
class DataEntry:
    """One data set of a run.

    Attributes:
        name: its name in data.json.
        paths: its files, in order.
        attr: names of columns and roles.
        media_dir: first folder in which a relative medium is looked for.
        max_rows: upper bound on its rows; None: all.
        times: how often its rows are used; a share below 1 takes that share of them, spread evenly.
        optional: keys of `attr` whose columns rows may lack.
        leads: a single medium without a tag is placed before the first turn of the user.
        unread: columns that `attr`, recognised from other rows, doesn't map; a row must not fill them.
    """

    name: str
    paths: tuple[str, ...]
    attr: DatasetAttr = field(default_factory=DatasetAttr)
    media_dir: str = ""
    max_rows: int | None = None
    times: float = 1.0
    optional: tuple[str, ...] = ()
    leads: bool = False
    unread: frozenset[str] = frozenset()


class RowSource:
    """The rows of data sets.

    Rows are numbered one data set after the other, each file after the one before it. With `lazy`, row numbers are
    positions in what `mixture` draws from the data sets instead, files are searched only as far as rows are read,
    and there is no length. Instances can be pickled and forked.

    Args:
        entries: The data sets.
        default_system: System text of rows that have none.
        is_text: Rows are plain text for pretraining.
        lazy: Find rows when they are read.
        mixture: How lazy rows are drawn from several data sets.
    """

    def __init__(
        self,
        entries: Sequence[DataEntry],
        *,
        default_system: str | None = None,
        is_text: bool = False,
        lazy: bool = False,
        mixture: Mixture | None = None,
    ) -> None:
        self.entries = list(entries)
        self.lazy = lazy
        self.readers = [
            RecordReader(entry.attr, default_system, is_text, entry.optional, entry.leads, entry.unread)
            for entry in entries
        ]
        paths = [path for entry in entries for path in entry.paths]
        self.files: list[RowFile] = [open_rows(path, is_text=is_text) for path in paths]
        self._owner = [number for number, entry in enumerate(entries) for _ in entry.paths]
        self.mixture = mixture or Mixture()
        self._drawn_entry, self._drawn_row = array("i"), array("q")
        self._draws: Iterator[tuple[int, int]] | None = None
        self.known_length: int | None = None
        self.offsets = np.zeros(1, dtype=np.int64)
        if lazy:
            empty = not self._draw_until(0)
        else:
            self.offsets = np.concatenate(([0], np.cumsum(list(self._sizes())))).astype(np.int64)
            self.known_length = int(self.offsets[-1])
            empty = not self.known_length
        if empty:
            raise DataError(f"no rows in {', '.join(path for entry in entries for path in entry.paths)}")

    @property
    def is_text(self) -> bool:
        """Whether all rows are plain text, without a conversation to render."""
        return all(reader.is_text for reader in self.readers)

    def _sizes(self) -> Iterator[int]:
        """Rows of each file that are used."""
        for owner, files in itertools.groupby(zip(self._owner, self.files, strict=True), key=lambda pair: pair[0]):
            left = self.entries[owner].max_rows
            for _, file in files:
                size = len(file) if left is None else min(left, len(file))
                left = None if left is None else left - size
                yield size

    def __len__(self) -> int:
        if self.lazy:
            raise TypeError("rows that are found while training goes on have no number of rows")
        return int(self.offsets[-1])

    def entry_bounds(self) -> list[tuple[int, int]]:
        """Return the numbers of the first row of each data set, and of the first one after it."""
        begins = [int(self.offsets[self._owner.index(number)]) for number in range(len(self.entries))]
        return list(itertools.pairwise([*begins, len(self)]))

    def _draw_until(self, index: int) -> bool:
        """Draw lazy rows up to number `index`; False if there are fewer."""
        if index >= len(self._drawn_row) and self.known_length is None:
            if self._draws is None:
                self._drawn_entry, self._drawn_row = array("i"), array("q")
                self._draws = self.mixture.draw([entry.times for entry in self.entries], self._entry_has)
            for entry, row in self._draws:
                self._drawn_entry.append(entry)
                self._drawn_row.append(row)
                if len(self._drawn_row) > index:
                    return True
            self.known_length = len(self._drawn_row)
        return 0 <= index < len(self._drawn_row)

    def _entry_has(self, entry: int, row: int) -> bool:
        limit = self.entries[entry].max_rows
        return (limit is None or row < limit) and self._find_in_entry(entry, row) is not None

    def _find_in_entry(self, entry: int, row: int) -> tuple[int, int] | None:
        """The file of a data set's row, and the row's number in it."""
        for number, owner in enumerate(self._owner):
            if owner == entry:
                if self.files[number].has(row):
                    return number, row
                row -= len(self.files[number])
        return None

    def _locate(self, index: int) -> tuple[int, int]:
        """The number of the file, and the row's number in it."""
        if self.lazy:
            if not self._draw_until(index):
                raise IndexError(f"row {index} of {self.known_length}")
            found = self._find_in_entry(self._drawn_entry[index], self._drawn_row[index])
            assert found is not None
            return found
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        number = int(np.searchsorted(self.offsets, index, side="right")) - 1
        return number, index - int(self.offsets[number])

    def has(self, index: int) -> bool:
        """Whether there is a row of this number; lazy rows are searched up to it."""
        return self._draw_until(index) if self.lazy else 0 <= index < len(self)

    def row(self, index: int) -> dict[str, Any]:
        """Return row `index` of all rows as it is in its file.

        Raises:
            BadSample: It can't be parsed.
            IndexError: There is no such row.
        """
        number, local = self._locate(index)
        return self.files[number].row(local)

    def read(self, index: int) -> Conversation:
        """Return row `index` as a conversation.

        Raises:
            BadSample: The row can't be used; the message has its file and row.
            IndexError: There is no such row.
        """
        number, local = self._locate(index)
        return self.readers[self._owner[number]].read(self.files[number].row(local), Place(self, index))

    def where(self, index: int) -> str:
        """Name the file and the row, for messages."""
        number, local = self._locate(index)
        return self.files[number].where(local)

    def folders(self, index: int) -> tuple[str, ...]:
        """Folders where a relative medium of row `index` is looked for, in this order; "" is the path as written."""
        return self.folders_of(self._locate(index)[0])

    def folders_of(self, number: int) -> tuple[str, ...]:
        """The same for the rows of file `number`."""
        return self.entries[self._owner[number]].media_dir, os.path.dirname(self.files[number].path), ""

    def head(
        self, number: int, limit: int
    ) -> tuple[RowFile, RecordReader, Iterator[tuple[int, dict[str, Any] | BadSample]]]:
        """Return file `number`, its reader and its first rows as (number in the file, row or BadSample)."""
        size = limit if self.lazy else int(self.offsets[number + 1] - self.offsets[number])
        rows = enumerate(self.files[number].head(min(limit, size)))
        return self.files[number], self.readers[self._owner[number]], rows

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_draws": None}  # rows beyond those that have been drawn are drawn anew
