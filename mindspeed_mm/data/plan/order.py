"""The order of rows: endless, computed from the seed alone, and addressed by a position that all ranks share."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from mindspeed_mm.utils.errors import DataError

_BLOCK = 4096


def shuffled(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    """Return the rows of an epoch in random order, the same with every version of numpy.

    Returns:
        [num_rows] int32, or int64 where there are more rows than that can number.
    """
    # PCG64's raw stream is fixed by numpy's compatibility policy, Generator.permutation is not.
    drawn = _stream(seed, epoch).random_raw(num_rows)
    order = np.argsort(drawn)  # several times as fast as a stable sort, which equal numbers alone would need
    drawn = drawn[order]
    if (drawn[1:] == drawn[:-1]).any():
        order = np.argsort(_stream(seed, epoch).random_raw(num_rows), kind="stable")
    return as_row_numbers(order)


def as_row_numbers(numbers: np.ndarray) -> np.ndarray:
    """Return row numbers in four bytes each, if they fit."""
    fits = not len(numbers) or int(numbers.max()) <= np.iinfo(np.int32).max
    return numbers.astype(np.int32 if fits else np.int64)


def _stream(*key: int) -> np.random.PCG64:
    return np.random.PCG64(np.random.SeedSequence(key))


class Order(ABC):
    """Rows epoch after epoch. Position p is the p-th row of all epochs, counted from 0.

    Attributes:
        shuffle: A new order every epoch; else file order.
        seed: Decides the orders.
    """

    def __init__(self, shuffle: bool, seed: int) -> None:
        self.shuffle = shuffle
        self.seed = seed

    @property
    @abstractmethod
    def num_rows(self) -> int | None:
        """Rows of an epoch; None as long as the end of the data has not been found."""

    @abstractmethod
    def epoch(self, epoch: int, start: int = 0) -> Iterator[int]:
        """Yield the rows of an epoch in order, from the `start`-th on."""

    @abstractmethod
    def locate(self, position: int) -> tuple[int, int]:
        """Return the epoch of a position, and the place within it."""

    @abstractmethod
    def find_end(self) -> int:
        """Return the number of rows of an epoch; searches for the end of the data where it is unknown."""

    @abstractmethod
    def end_found(self, num_rows: int) -> None:
        """Take the number of rows of an epoch that another process has found."""

    def rows_from(self, position: int) -> Iterator[int]:
        """Yield rows without end, from a position on."""
        epoch, place = self.locate(position)
        for number in itertools.count(epoch):
            yield from self.epoch(number, place)
            place = 0

    def rows_at(self, positions: Sequence[int]) -> list[int]:
        """Return the rows at increasing positions; each epoch among them is iterated once."""
        found: list[int] = []
        places = [self.locate(position) for position in positions]
        for epoch, group in itertools.groupby(places, key=lambda place: place[0]):
            wanted = [place for _, place in group]
            rows = enumerate(self.epoch(epoch, wanted[0]), start=wanted[0])
            remaining = iter(wanted)
            target = next(remaining)
            for place, row in rows:
                while place == target:  # pieces of one row share its position
                    found.append(row)
                    target = next(remaining, -1)
                if target < 0:
                    break
        return found


class FixedOrder(Order):
    """Rows whose number is known: every epoch is a permutation of them.

    Args:
        num_rows: Rows of the data set.
        shuffle: A new order every epoch; else file order.
        seed: Decides the orders.

    Raises:
        DataError: No rows.
    """

    def __init__(self, num_rows: int, shuffle: bool = True, seed: int = 1234) -> None:
        super().__init__(shuffle, seed)
        if num_rows < 1:
            raise DataError("the data set has no rows")
        self._num_rows = num_rows
        self._kept: tuple[int, np.ndarray] | None = None

    @property
    def num_rows(self) -> int:
        """Rows of an epoch."""
        return self._num_rows

    def rows_of(self, epoch: int) -> np.ndarray:
        """Return the rows of an epoch in order, [num_rows]."""
        if not self.shuffle:
            return np.arange(self._num_rows)
        if self._kept is None or self._kept[0] != epoch:
            self._kept = epoch, shuffled(self._num_rows, self.seed, epoch)
        return self._kept[1]

    def epoch(self, epoch: int, start: int = 0) -> Iterator[int]:
        """Yield the rows of an epoch in order, from the `start`-th on."""
        rows = self.rows_of(epoch)
        for first in range(start, len(rows), _BLOCK):
            yield from rows[first : first + _BLOCK].tolist()

    def locate(self, position: int) -> tuple[int, int]:
        """Return the epoch of a position, and the place within it."""
        return divmod(position, self._num_rows)

    def find_end(self) -> int:
        """Return the number of rows of an epoch."""
        return self._num_rows

    def end_found(self, num_rows: int) -> None:
        """Take the number of rows of an epoch, which is known here."""


class StreamOrder(Order):
    """Rows that are found while they are read: shuffled within a buffer of row numbers.

    The buffer contains the next `buffer_size` rows that have not been drawn; each draw takes one at random and puts the
    next row in its place. A position is found again by drawing as often as before, without reading any row.

    Args:
        has_row: Whether there is a row of this number; called with increasing numbers, none far beyond the last.
        buffer_size: Rows of the buffer.
        shuffle: Draw from the buffer; else file order.
        seed: Decides the draws of every epoch.
    """

    def __init__(
        self, has_row: Callable[[int], bool], buffer_size: int, shuffle: bool = True, seed: int = 1234
    ) -> None:
        super().__init__(shuffle, seed)
        self._has_row = has_row
        self._buffer_size = buffer_size
        self._found = 0  # rows that exist
        self._complete = False

    @property
    def num_rows(self) -> int | None:
        """Rows of an epoch; None as long as the end has not been found."""
        return self._found if self._complete else None

    def epoch(self, epoch: int, start: int = 0) -> Iterator[int]:
        """Yield the rows of an epoch in order, from the `start`-th on."""
        if not self.shuffle:
            for row in itertools.count(start):
                if not self._exists(row):
                    return
                yield row
        yield from itertools.islice(self._drawn(epoch), start, None)

    def locate(self, position: int) -> tuple[int, int]:
        """Return the epoch of a position, and the place within it; searches for the end of the data where needed."""
        if self._exists(position):
            return 0, position
        return divmod(position, self._found)

    def find_end(self) -> int:
        """Return the number of rows of an epoch; searches for the end of the data where it is unknown."""
        while not self._complete:
            self._exists(self._found)
        return self._found

    def end_found(self, num_rows: int) -> None:
        """Take the number of rows of an epoch that another process has found."""
        self._found, self._complete = num_rows, True

    def _drawn(self, epoch: int) -> Iterator[int]:
        stream = _stream(self.seed, epoch)
        buffer = [row for row in range(self._buffer_size) if row < self._found or self._exists(row)]
        following = len(buffer)
        while buffer:
            for raw in stream.random_raw(_BLOCK).tolist():
                slot = raw % len(buffer)
                row = buffer[slot]
                if following < self._found or self._exists(following):
                    buffer[slot] = following
                    following += 1
                else:
                    last = buffer.pop()
                    if slot < len(buffer):
                        buffer[slot] = last
                yield row
                if not buffer:
                    return

    def _exists(self, row: int) -> bool:
        """Whether a row exists; finds those up to it."""
        while row >= self._found and not self._complete:
            step = 1024
            while step and not self._has_row(self._found + step - 1):
                step //= 2
            self._found += step
            self._complete = step == 0
            if not self._found:
                raise DataError("the data set has no rows")
        return row < self._found
