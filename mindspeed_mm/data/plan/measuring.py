"""Measure the sizes of rows in advance, in worker processes where there are some, and keep them."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from torch.utils.data import Dataset

from mindspeed_mm.data.media.media import SampleSize
from mindspeed_mm.data.workers import WorkerFailure, next_batch, shut_down, start_loader, torch_loader, warm_up
from mindspeed_mm.utils.errors import MMError

_CHUNK = 32
_UNKNOWN = -1


class Measurable(Protocol):
    """A data set that knows what its rows cost before their samples are made."""

    def measure(self, row: int, /) -> list[SampleSize]:
        """Return the sizes of a row, one entry a piece."""


class SizeTable:
    """Sizes of rows by number, in a few bytes a row; grows as rows are found."""

    def __init__(self) -> None:
        self._tokens = np.empty(0, dtype=np.int32)
        self._media: np.ndarray | None = None  # [rows, 2] int64: patches, squared patches
        self._buckets: np.ndarray | None = None  # [rows] int32
        self._special: dict[int, list[SampleSize]] = {}  # rows of several pieces, and those with a fault
        self._known = 0

    def __len__(self) -> int:
        """Number of rows that are known."""
        return self._known

    def __contains__(self, row: int) -> bool:
        return row < len(self._tokens) and self._tokens[row] != _UNKNOWN

    def __getitem__(self, row: int) -> list[SampleSize]:
        if row in self._special:
            return self._special[row]
        patches, squared = self._media[row].tolist() if self._media is not None else (0, 0)
        bucket = int(self._buckets[row]) if self._buckets is not None else _UNKNOWN
        return [SampleSize(int(self._tokens[row]), patches, squared, bucket=None if bucket == _UNKNOWN else bucket)]

    def __setitem__(self, row: int, sizes: list[SampleSize]) -> None:
        self._reserve(row + 1)
        self._known += self._tokens[row] == _UNKNOWN
        self._tokens[row] = sum(size.tokens for size in sizes)
        if len(sizes) != 1 or sizes[0].fault is not None:
            self._special[row] = sizes
            return
        if sizes[0].patches:
            if self._media is None:
                self._media = np.zeros((len(self._tokens), 2), dtype=np.int64)
            self._media[row] = sizes[0].patches, sizes[0].squared_patches
        if sizes[0].bucket is not None:
            if self._buckets is None:
                self._buckets = np.full(len(self._tokens), _UNKNOWN, dtype=np.int32)
            self._buckets[row] = sizes[0].bucket

    def _reserve(self, rows: int) -> None:
        if rows <= len(self._tokens):
            return
        more = max(rows, 2 * len(self._tokens), 1024) - len(self._tokens)
        self._tokens = np.concatenate([self._tokens, np.full(more, _UNKNOWN, dtype=np.int32)])
        if self._media is not None:
            self._media = np.concatenate([self._media, np.zeros((more, 2), dtype=np.int64)])
        if self._buckets is not None:
            self._buckets = np.concatenate([self._buckets, np.full(more, _UNKNOWN, dtype=np.int32)])


class _Measured(Dataset):
    """The data set of the measuring workers: maps chunks of rows to their sizes; errors are returned as values."""

    def __init__(self, dataset: Measurable) -> None:
        self._dataset = dataset

    def __getitems__(self, rows: Sequence[int]) -> Any:
        try:
            return [self._dataset.measure(row) for row in rows]
        except MMError as error:
            return WorkerFailure(str(error))


class Measurer:
    """Measures the sizes of rows in the order in which they will be needed.

    Every rank measures for itself, so that none waits for another; the results are equal. A row is measured once;
    later epochs take its size from memory.

    Args:
        dataset: The data set.
        num_workers: Processes that measure in advance; 0: rows are measured when they are needed.
        num_rows: Returns the number of rows, None as long as it isn't known.
    """

    def __init__(self, dataset: Measurable, num_workers: int, num_rows: Callable[[], int | None]) -> None:
        self._dataset = dataset
        self._num_workers = num_workers
        self._num_rows = num_rows
        self.table = SizeTable()

    @property
    def is_complete(self) -> bool:
        """Whether the size of every row is known."""
        return len(self.table) == self._num_rows()

    def sizes(self, rows: Iterable[int]) -> Generator[list[SampleSize], None, None]:
        """Yield the sizes of each row, in the order of `rows`, which may be endless and are read in advance.

        Closing the iterator ends its workers.

        Raises:
            DataError: A row can't be used, or a worker died.
        """
        rows = iter(rows)
        if self._num_workers and not self.is_complete:
            yield from self._measured_by_workers(rows)
        for row in rows:
            if row not in self.table:
                self.table[row] = self._dataset.measure(row)
            yield self.table[row]

    def _measured_by_workers(self, rows: Iterator[int]) -> Iterator[list[SampleSize]]:
        """Yield sizes measured by workers, until every row is known or `rows` ends."""
        sent: deque[tuple[list[int], list[int]]] = deque()

        def chunks() -> Iterator[list[int]]:
            while chunk := list(itertools.islice(rows, _CHUNK)):
                asked = [row for row in dict.fromkeys(chunk) if row not in self.table]
                sent.append((chunk, asked))
                yield asked

        warm_up(self._dataset)
        loader = torch_loader(_Measured(self._dataset), chunks(), self._num_workers, seed=0, prefetch_factor=8)
        running = start_loader(loader)
        try:
            while not self.is_complete:
                try:
                    found = next_batch(running, self._num_workers)
                except StopIteration:
                    return
                chunk, asked = sent.popleft()
                for row, sizes in zip(asked, found, strict=True):
                    self.table[row] = sizes
                yield from (self.table[row] for row in chunk)
        finally:
            shut_down(running)
        for chunk, _ in sent:
            yield from (self.table[row] for row in chunk)
