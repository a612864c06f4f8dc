"""Which queries of a ring rank see which keys of another, and how they are handed to a kernel (see `ring.py`)."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mindspeed_mm.accelerator.attention import CAUSAL, AttentionKernel, Band, PackedLengths


class TokenSelection(Protocol):
    """A choice of the tokens of tensors `[batch, tokens, …]`."""

    def take(self, tensor: Tensor) -> Tensor:
        """Return their part of a tensor: a view if there can be one."""

    def put(self, tensor: Tensor, part: Tensor) -> None:
        """Write a part, which `take` returned and which was changed in place, back into the tensor."""

    def are_all_of(self, shape: Sequence[int]) -> bool:
        """Whether they are all tokens of a tensor of this shape, in order."""

    def add(self, tensor: Tensor, part: Tensor) -> None:
        """Add a part to the tensor."""


@dataclass(frozen=True)
class TokenRange:
    """The same run of tokens in several rows."""

    rows: slice
    tokens: slice

    def take(self, tensor: Tensor) -> Tensor:
        return tensor[self.rows, self.tokens]

    def put(self, tensor: Tensor, part: Tensor) -> None:
        """Do nothing: the part is a view."""

    def are_all_of(self, shape: Sequence[int]) -> bool:
        return (self.rows, self.tokens) == (slice(0, shape[0]), slice(0, shape[1]))

    def add(self, tensor: Tensor, part: Tensor) -> None:
        tensor[self.rows, self.tokens].add_(part)


@dataclass(frozen=True, eq=False)
class PackedTokens:
    """Any tokens of a contiguous tensor, packed into one row.

    Attributes:
        index: their places, counted through all rows.
    """

    index: Tensor

    def take(self, tensor: Tensor) -> Tensor:
        return tensor.flatten(0, 1).index_select(0, self.index).unsqueeze(0)

    def put(self, tensor: Tensor, part: Tensor) -> None:
        tensor.view(-1, *tensor.shape[2:]).index_copy_(0, self.index, part.squeeze(0))

    def are_all_of(self, shape: Sequence[int]) -> bool:
        return False

    def add(self, tensor: Tensor, part: Tensor) -> None:
        tensor.view(-1, *tensor.shape[2:]).index_add_(0, self.index, part.squeeze(0).to(tensor.dtype))


@dataclass(frozen=True)
class Part:
    """Queries and keys that a kernel computes at once.

    Attributes:
        queries, keys: their tokens.
        band: the keys that each query sees; None: all of them.
        lengths: the sequences in them, if these are packed.
    """

    queries: TokenSelection
    keys: TokenSelection
    band: Band | None
    lengths: PackedLengths | None = None


@dataclass(frozen=True)
class _Ranges:
    """A part before it is packed."""

    rows: slice
    queries: slice
    keys: slice
    band: Band | None

    def whole(self) -> Part:
        return Part(TokenRange(self.rows, self.queries), TokenRange(self.rows, self.keys), self.band)


@dataclass(frozen=True)
class RingLayout:
    """A batch of rows as one rank of the ring holds it.

    Attributes:
        chunks: for each row the tokens in a chunk of each document.
        rank, ranks: rank in the ring and size of the ring.
        window: size of the sliding window, if there is one.
    """

    chunks: tuple[tuple[int, ...], ...]
    rank: int
    ranks: int
    window: int | None

    def parts(self, source: int, kernel: AttentionKernel, tokens: int, device: torch.device) -> list[Part]:
        """Return what is to be computed with the keys of rank `source`.

        Args:
            kernel: what computes it. If it takes packed sequences, those that see in the same way come in one part.
            tokens: tokens in a row on this rank.
        """
        packed, single = [], []
        for band, ranges in self._by_band(source).items():
            if kernel.takes_packed and kernel.takes(band) and len(ranges) > 1:
                packed.append(self._packed(source, band, tokens, device))
            else:
                single += [each.whole() for each in ranges]
        return packed + single

    @functools.lru_cache(maxsize=256)  # noqa: B019 (a value, not an object with a life of its own)
    def _by_band(self, source: int) -> dict[Band | None, tuple[_Ranges, ...]]:
        if len(set(self.chunks)) == 1:
            rows = [(slice(0, len(self.chunks)), self.chunks[0])]
        else:
            rows = [(slice(row, row + 1), chunks) for row, chunks in enumerate(self.chunks)]
        found: dict[Band | None, list[_Ranges]] = {}
        for which, chunks in rows:
            for ranges in self._ranges(which, chunks, source):
                found.setdefault(ranges.band, []).append(ranges)
        return {band: tuple(ranges) for band, ranges in found.items()}

    @functools.lru_cache(maxsize=64)  # noqa: B019
    def _packed(self, source: int, band: Band | None, tokens: int, device: torch.device) -> Part:
        """Return all ranges of a band as one part."""
        runs = [
            (row * tokens, ranges.queries, ranges.keys)
            for ranges in self._by_band(source)[band]
            for row in range(ranges.rows.start, ranges.rows.stop)
        ]

        def places(of: list[tuple[int, slice]]) -> PackedTokens:
            index = torch.cat([torch.arange(row + run.start, row + run.stop) for row, run in of])
            return PackedTokens(index.to(device, non_blocking=True))

        lengths = PackedLengths(
            tuple(queries.stop - queries.start for _, queries, _ in runs),
            tuple(keys.stop - keys.start for _, _, keys in runs),
        )
        queries = places([(row, queries) for row, queries, _ in runs])
        keys = places([(row, keys) for row, _, keys in runs])
        return Part(queries, keys, band, lengths)

    def _ranges(self, rows: slice, chunks: tuple[int, ...], source: int) -> Iterator[_Ranges]:
        start = 0
        for chunk in chunks:
            first, second = slice(start, start + chunk), slice(start + chunk, start + 2 * chunk)
            both = slice(start, start + 2 * chunk)
            start += 2 * chunk
            if not chunk:
                continue
            if self.window is not None and self.window < 2 * self.ranks * chunk:
                yield from self._ranges_under_window(rows, (first, second), chunk, source)
            elif source == self.rank:
                yield _Ranges(rows, both, both, CAUSAL)
            elif source < self.rank:
                yield _Ranges(rows, both, first, None)
            else:
                yield _Ranges(rows, second, both, None)

    def _ranges_under_window(
        self, rows: slice, halves: tuple[slice, slice], chunk: int, source: int
    ) -> Iterator[_Ranges]:
        """Yield the pairs of chunks of a document that see each other, wholly or in part."""
        window = self.window
        assert window is not None
        for queries, of_queries in zip(halves, self._chunks_of(self.rank)):
            for keys, of_keys in zip(halves, self._chunks_of(source)):
                offset = (of_queries - of_keys) * chunk
                nearest, farthest = offset - (chunk - 1), offset + (chunk - 1)
                if offset < 0 or nearest >= window:
                    continue
                band: Band | None = Band(offset, window)
                if farthest < window:
                    band = None if offset else CAUSAL
                yield _Ranges(rows, queries, keys, band)

    def _chunks_of(self, rank: int) -> tuple[int, int]:
        return rank, 2 * self.ranks - 1 - rank
