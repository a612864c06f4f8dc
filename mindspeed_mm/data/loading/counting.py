"""Count rows, tokens and media of micro-batches on the host, before they are moved to a device."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mindspeed_mm.data.adapter import DataAdapter
from mindspeed_mm.data.media.media import KINDS, MediaKind, MediaSize

COUNTS = "counts"
"""Field of a micro-batch that was counted and prepared where it was collated."""
HOST_FIELDS = ("num_rows", "row_ids", "rows_left_out", "num_tokens", "media_sizes", COUNTS)
"""Fields of a micro-batch that are read on the host and that no model takes."""


def drop_host_fields(batch: MutableMapping[str, Any]) -> None:
    """Remove the host fields of a micro-batch before it is moved to a device."""
    for name in HOST_FIELDS:
        batch.pop(name, None)


@dataclass(frozen=True)
class RankCounts:
    """What each rank had of a step.

    Attributes:
        cost, tokens: of each data-parallel rank; see `BatchCounts`.
        memory_bytes: the largest memory of each process's device so far; empty in steps in which nobody looked.
    """

    cost: Sequence[float]
    tokens: Sequence[int]
    memory_bytes: Sequence[int] = ()


@dataclass
class BatchCounts:
    """Sums over micro-batches.

    Attributes:
        rows: real samples.
        tokens: positions with a token (documents, attention_mask, or all of input_ids).
        positions: all positions of input_ids, padding included.
        targets: positions that are trained.
        rows_left_out: rows that could not be used.
        media: modality → number of media.
        row_ids: numbers of the samples in the data set, always of this rank alone; None: no micro-batch had them.
        wait_seconds: time spent waiting for data; of a whole step, the longest of any rank.
        lengths: tokens of each sample (what attention costs), always of this rank alone.
        media_sizes: kind of media → their sizes (what encoders cost), always of this rank alone.
        flops: FLOPs of the model; None: not known.
        imbalance: of a whole step, the largest cost of a rank over the mean of all.
        memory_bytes: of one rank, the largest memory of its device so far; 0: it hasn't looked.
        ranks: of a whole step, what each rank had.
    """

    rows: int = 0
    tokens: int = 0
    positions: int = 0
    targets: int = 0
    rows_left_out: int = 0
    media: dict[str, int] = field(default_factory=dict)
    row_ids: list[int] | None = None
    wait_seconds: float = 0.0
    lengths: list[int] = field(default_factory=list)
    media_sizes: dict[MediaKind, MediaSize] = field(default_factory=dict)
    flops: float | None = None
    imbalance: float = 1.0
    memory_bytes: int = 0
    ranks: RankCounts | None = None

    @property
    def cost(self) -> float:
        """FLOPs, or tokens where those of the model are not known."""
        return self.flops or self.tokens

    @property
    def row_lengths(self) -> list[int]:
        """`lengths` without those of fillers, which stand for rows that were left out and are the shortest."""
        fillers = max(0, len(self.lengths) - self.rows)
        return sorted(self.lengths)[fillers:] if fillers else self.lengths

    def add(self, other: BatchCounts) -> None:
        """Add the counts of a micro-batch."""
        self.rows += other.rows
        self.tokens += other.tokens
        self.positions += other.positions
        self.targets += other.targets
        self.rows_left_out += other.rows_left_out
        self.lengths += other.lengths
        for modality, number in other.media.items():
            self.media[modality] = self.media.get(modality, 0) + number
        for kind, size in other.media_sizes.items():
            self.media_sizes[kind] = self.media_sizes.get(kind, MediaSize()) + size
        if other.row_ids is not None:
            self.row_ids = (self.row_ids or []) + other.row_ids


class CountingIterator:
    """Yields micro-batches unchanged and accumulates their counts until `take` is called.

    A user's own loader may yield anything: what is not a mapping with the usual keys counts as one micro-batch of rows.
    """

    def __init__(
        self,
        source: Iterable[Any],
        micro_batch_size: int,
        adapter: DataAdapter | None = None,
    ) -> None:
        """
        Args:
            source: yields micro-batches; it is iterated over from `start`, or the first batch, on.
            micro_batch_size: rows of a micro-batch without `num_rows`.
            adapter: counts the media of a batch; None: they are not counted.
        """
        self._source = source
        self._running: Iterator[Any] | None = None
        self._micro_batch_size = micro_batch_size
        self._adapter = adapter
        self._counts = BatchCounts()

    def __iter__(self) -> CountingIterator:
        return self

    def start(self) -> Iterator[Any]:
        """Begin to iterate over the source unless that has begun, and return its iterator.

        The workers of a loader that starts with its iterator prepare the first micro-batches from now on.
        """
        if self._running is None:
            self._running = iter(self._source)
        return self._running

    def __next__(self) -> Any:
        started = time.perf_counter()
        batch = next(self.start())
        self._counts.wait_seconds += time.perf_counter() - started
        self._count(batch)
        return batch

    def take(self) -> BatchCounts:
        """Return the sums since the last call and start anew."""
        counts, self._counts = self._counts, BatchCounts()
        return counts

    def _count(self, yielded: object) -> None:
        batch: Mapping[str, Any] = yielded if isinstance(yielded, Mapping) else {}
        counts = batch.get(COUNTS)
        self._counts.add(counts if isinstance(counts, BatchCounts) else counts_of(batch, self._adapter))
        self._counts.add(_rows_of(batch, self._micro_batch_size))


def counts_of(batch: Mapping[str, Any], adapter: DataAdapter | None = None) -> BatchCounts:
    """Count the tokens, targets and media of a micro-batch in host memory; its rows aren't counted.

    Args:
        batch: as it was collated.
        adapter: counts its media; None: they are not counted.
    """
    counts = BatchCounts()
    if "sample_keys" in batch:
        return _counts_of_shapes(batch)
    ids = batch.get("input_ids")
    if not isinstance(ids, torch.Tensor):
        return counts
    counts.positions = ids.numel()
    counts.lengths = _sample_lengths(batch, ids)
    counts.tokens = sum(counts.lengths)
    labels = batch.get("labels")
    counts.targets = int((labels != -100).sum()) if isinstance(labels, torch.Tensor) else 0
    if adapter is not None:
        counts.media = {modality: int(number) for modality, number in adapter.media_counts(batch).items()}
    if isinstance(sizes := batch.get("media_sizes"), torch.Tensor):
        each = zip(KINDS, (MediaSize(*size) for size in sizes.tolist()), strict=True)
        counts.media_sizes = {kind: size for kind, size in each if size.patches}
    return counts


def _rows_of(batch: Mapping[str, Any], micro_batch_size: int) -> BatchCounts:
    """Count the rows of a micro-batch, and those left out, by its host fields."""
    counts, rows = BatchCounts(), batch.get("sample_keys", batch.get("input_ids"))
    counts.rows = int(batch.get("num_rows", len(rows) if isinstance(rows, torch.Tensor) else micro_batch_size))
    counts.rows_left_out = int(batch.get("rows_left_out", 0))
    if "row_ids" in batch:
        ids = batch["row_ids"]
        numbers = ids.tolist() if isinstance(ids, torch.Tensor) else ids  # at once: a read of each would be slow
        counts.row_ids = [int(number) for number in numbers if number >= 0]
    return counts


def _counts_of_shapes(batch: Mapping[str, Any]) -> BatchCounts:
    """Count a micro-batch of clips or latents of one shape: tokens are those of the diffusion transformer."""
    tokens, rows = int(batch.get("num_tokens", 0)), int(batch.get("num_rows", len(batch["sample_keys"])))
    counts = BatchCounts(tokens=tokens, positions=tokens, lengths=[tokens // max(rows, 1)] * rows)
    clips = batch.get("video", batch.get("latents"))
    if isinstance(clips, torch.Tensor):
        counts.media = {"image" if clips.shape[2] == 1 else "video": rows}
    return counts


def _sample_lengths(batch: Mapping[str, Any], ids: torch.Tensor) -> list[int]:
    """Tokens of each sample: of packed rows by their documents, else of each row by its mask."""
    documents, mask = batch.get("documents"), batch.get("attention_mask")
    if isinstance(documents, torch.Tensor):
        row = torch.arange(len(documents), device=documents.device).unsqueeze(1)
        counted = torch.bincount((documents + row * (documents.max() + 1))[documents > 0])
        return [length for length in counted.tolist() if length]
    return mask.sum(1).tolist() if isinstance(mask, torch.Tensor) and mask.dim() == 2 else [ids.shape[1]] * len(ids)
