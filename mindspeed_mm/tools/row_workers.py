"""Check rows of a data set in worker processes, a chunk at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, TypeVar

RowFactsT = TypeVar("RowFactsT")

CHUNK = 16  # rows that a worker takes at once


class FactChunks(Protocol[RowFactsT]):
    """The facts of rows, a chunk at a time."""

    def __len__(self) -> int:
        """Number of chunks."""

    def __getitem__(self, chunk: int, /) -> list[RowFactsT]:
        """Return the facts of a chunk of rows."""


def look_at(rows: FactChunks[RowFactsT], workers: int) -> Iterator[RowFactsT]:
    """Yield the facts of rows, computed by worker processes, with a progress bar.

    Args:
        rows: their facts, a chunk at a time.
        workers: number of processes; few rows are read in this one.
    """
    from rich.console import Console
    from rich.progress import track
    from torch.utils.data import DataLoader

    from mindspeed_mm.data.workers import forked

    workers = workers if len(rows) > 4 else 0
    chunks = DataLoader(rows, batch_size=None, shuffle=False, num_workers=workers, **forked(workers))
    console = Console(stderr=True)
    for chunk in track(chunks, "reading rows", len(rows), console=console, disable=not console.is_terminal):
        yield from chunk
