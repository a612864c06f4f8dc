"""Measure the sizes of rows, each of them in one process of a node."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from typing import Any, Protocol

from mindspeed_mm.data.media.media import SampleSize
from mindspeed_mm.data.plan.size_table import ROW_BYTES, SizeTable
from mindspeed_mm.utils.errors import MMError
from mindspeed_mm.utils.node_folder import NodeFolder

_CHUNK = 32
#: rows that a helper measures beyond those that have been asked for
_AHEAD = 1024
#: seconds after which a row that another process measures is measured in this one, too
LONGEST_WAIT = 60.0


class Measurable(Protocol):
    """A data set that knows what its rows cost before their samples are made."""

    def measure(self, row: int, /) -> list[SampleSize]:
        """Return the sizes of a row, one entry a piece."""


class Measurer:
    """Measures the sizes of rows in the order in which they will be needed, and keeps them.

    The processes of a node that read the same data share the sizes: each row is measured by the one that comes to it
    first, and who needs a row that another process measures just now waits for that row alone. If that process ends,
    or takes too long, the row is measured by who waits. The sizes don't depend on who has measured them.

    Args:
        dataset: The data set. Its `sizes_key()`, if it has one, names what its sizes depend on; without it, sizes are
            shared with processes that are forked from this one only.
        processes: Processes that measure in advance, beside the one that plans.
        num_rows: Returns the number of rows, None as long as it isn't known.
    """

    def __init__(self, dataset: Measurable, processes: int, num_rows: Callable[[], int | None]) -> None:
        self.dataset = dataset
        self.processes = processes
        self._num_rows = num_rows
        self._folder: NodeFolder | None = None
        self._table: SizeTable | None = None
        self.asked: Any = None  # where helpers are told how many rows have been asked for

    @property
    def table(self) -> SizeTable:
        """The sizes that are known."""
        if self._table is None:
            key = getattr(self.dataset, "sizes_key", None)
            num_rows = self._num_rows()
            self._folder = NodeFolder.open(key() if callable(key) else None, ROW_BYTES * (num_rows or 0))
            self._table = SizeTable(num_rows, None if self._folder is None else self._folder.path)
        return self._table

    def sizes(self, rows: Iterable[int]) -> Generator[list[SampleSize], None, None]:
        """Yield the sizes of each row, as `measured` yields the rows."""
        with closing(self.measured(rows)) as measured:
            for row in measured:
                yield self.table[row]

    def measured(self, rows: Iterable[int]) -> Generator[int, None, None]:
        """Yield `rows`, which may be endless and are read in advance; the size of each is in the table by then.

        Raises:
            DataError: A row can't be used.
        """
        rows = iter(rows)
        while chunk := list(itertools.islice(rows, _CHUNK)):
            if self.asked is not None:
                self.asked.value += len(chunk)
            unknown = self.table.unknown(chunk)
            for row in chunk:
                if unknown and row == unknown[0]:
                    self._obtain(*unknown)
                    del unknown[0]
                yield row

    def help(self, rows: Iterable[int]) -> None:
        """Measure rows in advance, in a process that does nothing else, until all are known or `rows` ends.

        Args:
            rows: Those that another process passes to `measured`.
        """
        rows, seen, idle = iter(rows), 0, 0
        while self._folder is not None and (chunk := list(itertools.islice(rows, _CHUNK))):
            while seen > self.asked.value + _AHEAD:
                time.sleep(0.01)
            unknown = self.table.unknown(chunk)
            for row in unknown:
                self._try(row)
            seen += len(chunk)
            idle = 0 if unknown else idle + len(chunk)
            if idle >= (self._num_rows() or math.inf):
                return

    def close(self) -> None:
        """Forget the sizes."""
        if self._folder is not None:
            self._folder.close()
        self._folder = self._table = None

    def _obtain(self, row: int, *following: int) -> None:
        """Bring the size of a row into the table; while another process measures it, some of the following ones."""
        deadline, others = time.monotonic() + LONGEST_WAIT, iter(following)
        while row not in self.table:
            if self._folder is None or time.monotonic() > deadline:
                self.table[row] = self.dataset.measure(row)
            elif self._folder.try_lock(row):
                try:
                    if row not in self.table:
                        self.table[row] = self.dataset.measure(row)
                finally:
                    self._folder.unlock(row)
            elif (other := next(others, None)) is None:
                time.sleep(0.001)
            else:
                self._try(other)

    def _try(self, row: int) -> None:
        """Measure a row that may be needed later, unless another process does; it has its error when it is needed."""
        if self._folder is None or not self._folder.try_lock(row):
            return
        try:
            if row not in self.table:
                self.table[row] = self.dataset.measure(row)
        except MMError:
            pass
        finally:
            self._folder.unlock(row)
