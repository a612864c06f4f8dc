"""Count what passes through a data iterator, on the host, before anything reaches a device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class BatchCounts:
    """Sums over micro-batches.

    Attributes:
        rows: real rows.
        tokens: positions that hold a token (attention_mask, or all of input_ids).
        positions: all positions of input_ids, padding included.
        media: modality → number of media.
        wait_seconds: time spent waiting for data.
    """

    rows: int = 0
    tokens: int = 0
    positions: int = 0
    media: dict[str, int] = field(default_factory=dict)
    wait_seconds: float = 0.0


class CountingIterator:
    """Passes micro-batches on and keeps their sums until `take` is called.

    A user's own loader may yield anything: what is not a mapping with the usual keys counts as one micro-batch of rows.
    """

    def __init__(
        self,
        source: Iterator[Any],
        micro_batch_size: int,
        media_counts: Callable[[Mapping[str, Any]], Mapping[str, int]] | None = None,
    ) -> None:
        """
        Args:
            source: yields micro-batches.
            micro_batch_size: rows of a micro-batch that doesn't say.
            media_counts: from the data adapter; None: media are not counted.
        """
        self._source = source
        self._micro_batch_size = micro_batch_size
        self._media_counts = media_counts
        self._counts = BatchCounts()

    @property
    def counts_media(self) -> bool:
        """Whether `take` reports media."""
        return self._media_counts is not None

    def __iter__(self) -> CountingIterator:
        return self

    def __next__(self) -> Any:
        started = time.perf_counter()
        batch = next(self._source)
        self._counts.wait_seconds += time.perf_counter() - started
        self._count(batch)
        return batch

    def take(self) -> BatchCounts:
        """Return the sums since the last call and start anew."""
        counts, self._counts = self._counts, BatchCounts()
        return counts

    def _count(self, batch: Any) -> None:
        counts = self._counts
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if not isinstance(ids, torch.Tensor):
            counts.rows += self._micro_batch_size
            return
        counts.rows += int(batch.get("num_rows", ids.shape[0]))
        counts.positions += ids.numel()
        mask = batch.get("attention_mask")
        counts.tokens += int(mask.sum()) if isinstance(mask, torch.Tensor) and mask.dim() == 2 else ids.numel()
        if self._media_counts is not None:
            for modality, number in self._media_counts(batch).items():
                counts.media[modality] = counts.media.get(modality, 0) + int(number)
