"""Measure the sizes of rows in advance, in worker processes where there are some, and keep them."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch.utils.data import Dataset

from mindspeed_mm.data.media.media import SampleSize
from mindspeed_mm.data.workers import WorkerFailure, next_batch, shut_down, start_loader, torch_loader, warm_up
from mindspeed_mm.utils.errors import MMError

_CHUNK = 32
_UNKNOWN = -1
NO_TOKENS = "no tokens"


class Measurable(Protocol):
    """A data set that knows what its rows cost before their samples are made."""

    def measure(self, row: int, /) -> list[SampleSize]:
        """Return the sizes of a row, one entry a piece."""


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

    def samples(self, rows: Sequence[int]) -> SampleSizes:
        """Return the sizes of the samples of known rows."""
        numbers = np.asarray(rows, dtype=np.int64)
        places, pieces = np.arange(len(numbers)), np.zeros(len(numbers), dtype=np.int64)
        tokens = self._tokens[numbers].astype(np.int64)
        media = np.zeros((len(numbers), 2), dtype=np.int64) if self._media is None else self._media[numbers]
        faults = [(int(place), NO_TOKENS) for place in np.flatnonzero(tokens == 0)]
        special = [place for place, row in enumerate(rows) if row in self._special] if self._special else []
        if special:
            found = [(place, self._special[rows[place]]) for place in special]
            several = np.array(
                [
                    (place, piece, size.tokens, size.patches, size.squared_patches)
                    for place, sizes in found
                    for piece, size in enumerate(sizes)
                ],
                dtype=np.int64,
            ).reshape(-1, 5)
            plain = np.ones(len(numbers), dtype=bool)
            plain[special] = False
            together = np.column_stack([places, pieces, tokens, media])[plain]
            together = np.concatenate([together, several])
            together = together[np.argsort(together[:, 0], kind="stable")]
            places, pieces, tokens, media = together[:, 0], together[:, 1], together[:, 2], together[:, 3:]
            of_special = set(special)
            faults = [fault for fault in faults if fault[0] not in of_special]
            faults += [(p, size.fault or NO_TOKENS) for p, sizes in found for size in sizes if not size.tokens]
            faults.sort(key=lambda fault: fault[0])
        if faults:
            kept = tokens > 0
            places, pieces, tokens, media = places[kept], pieces[kept], tokens[kept], media[kept]
        return SampleSizes(places, pieces, tokens, media[:, 0], media[:, 1], faults)

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
        """Yield the sizes of each row, as `measured` yields the rows."""
        with closing(self.measured(rows)) as measured:
            for row in measured:
                yield self.table[row]

    def measured(self, rows: Iterable[int]) -> Generator[int, None, None]:
        """Yield `rows`, which may be endless and are read in advance; the size of each is in the table by then.

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
            yield row

    def _measured_by_workers(self, rows: Iterator[int]) -> Iterator[int]:
        """Yield rows measured by workers, until every row is known or `rows` ends."""
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
                yield from chunk
        finally:
            shut_down(running)
        for chunk, _ in sent:
            yield from chunk
