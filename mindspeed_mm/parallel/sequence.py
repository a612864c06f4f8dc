"""The part of a micro-batch's tokens that a context-parallel rank processes.

Rows are documents one after the other; padding, at either end of a row, is a document of its own.

- With Ulysses alone, rows stay in order, are filled up at the end, and each rank has a contiguous part of every row.
- With a ring of r ranks, every document by itself is filled up to 2r chunks of c tokens, and rank i has chunks i and
  2r-1-i (zigzag), so that under a causal mask all ranks have the same work, whatever the lengths of the documents, and
  the same structure: of each row a list of c. Padding is left out, as nothing attends to it. If there are Ulysses
  ranks, too, each has a contiguous part of its ring rank's tokens.

Source of the zigzag: Brandon et al., Striped Attention (arXiv 2311.09431), and Megatron-core's context parallelism,
which cut rows; here it is documents that are cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

FILL = -1
"""Marks a position of a shard that is filled up: it has no token."""


@dataclass(frozen=True)
class SequencePlace:
    """The place of a process among the ranks that split the tokens of a row.

    Attributes:
        ring, ulysses: numbers of ranks.
        ring_rank, ulysses_rank: those of this process.
    """

    ring: int = 1
    ring_rank: int = 0
    ulysses: int = 1
    ulysses_rank: int = 0


@dataclass
class SequenceShard:
    """Which positions of a micro-batch's rows a rank has. All state is in fields, as it moves to the device in a batch.

    Attributes:
        index: [batch, local] int64: positions in the rows, FILL where there is none.
        length: of the whole rows.
        is_filled: whether `index` has any FILL.
        chunks: with a ring, of each row the sizes c of its documents' chunks, of which this ring rank has two; else [].
        documents: [batch, local * ulysses] int64: without a ring, numbers of the documents of the filled-up rows, 0 for
            padding; None if causal attention alone keeps tokens from seeing padding and other documents, and with a
            ring.
        cumulative_lengths: beside `documents`, [documents + 1] int32, over the flattened filled-up rows; else None.
        longest: beside `documents`, tokens of the longest document.
    """

    index: torch.Tensor
    length: int
    is_filled: bool
    chunks: list[list[int]]
    documents: torch.Tensor | None = None
    cumulative_lengths: torch.Tensor | None = None
    longest: int = 0

    @classmethod
    def of(cls, documents: torch.Tensor, place: SequencePlace) -> SequenceShard:
        """Find the shard of a process, on the host.

        Args:
            documents: [batch, sequence] int64, number of each position's document within its row, 0 for padding.
            place: of the process.
        """
        batch, length = documents.shape
        runs = [_runs(row) for row in documents]
        if place.ring > 1:
            rows = [_zigzag(row, place) for row in runs]
            chunks = [[_chunk(size, place.ring) for number, size in row if number] for row in runs]
        else:
            rows, chunks = [torch.arange(length)] * batch, []
        filled = max(1, -(-max(map(len, rows)) // place.ulysses)) * place.ulysses
        whole = torch.stack([F.pad(row, (0, filled - len(row)), value=FILL) for row in rows])
        index = whole.chunk(place.ulysses, dim=1)[place.ulysses_rank].contiguous()
        shard = cls(index, length, bool((index == FILL).any()), chunks)
        if place.ring == 1 and any(_needs_mask(row) for row in runs):
            shard.documents = F.pad(documents, (0, filled - length))
            lengths = torch.tensor([0, *(size for row in shard.documents for _, size in _runs(row))])
            shard.cumulative_lengths, shard.longest = lengths.cumsum(0).int(), int(lengths.max())
        return shard

    def cut(self, tensor: torch.Tensor, dim: int, fill: float = 0) -> torch.Tensor:
        """Return this rank's positions of a tensor.

        Args:
            tensor: [..., batch or 1, sequence, ...].
            dim: that of the sequence; rows are the dimension before it.
            fill: value of positions without a token.

        Returns:
            [..., batch, local, ...].

        Raises:
            ValueError: another number of positions than the rows have.
        """
        dim %= tensor.dim()
        batch, before, after = len(self.index), tensor.shape[: dim - 1], tensor.shape[dim + 1 :]
        if tensor.shape[dim] != self.length:
            raise ValueError(f"a tensor {list(tensor.shape)} has no {self.length} positions in dimension {dim}")
        rows = torch.arange(batch, device=self.index.device).unsqueeze(1) * self.length
        flat = (rows + self.index.clamp(min=0)).flatten()
        whole = tensor.expand(*before, batch, self.length, *after).flatten(dim - 1, dim)
        own = whole.index_select(dim - 1, flat).unflatten(dim - 1, self.index.shape)
        if not self.is_filled:
            return own
        return own.masked_fill((self.index == FILL).view(*self.index.shape, *[1] * len(after)), fill)

    def places(self, positions: torch.Tensor) -> torch.Tensor:
        """Return where positions of the rows are in this shard, on the host.

        Args:
            positions: [n] int64, in the flattened [batch * sequence] rows.

        Returns:
            [n] int64, in the flattened [batch * local] shard; FILL for those that other ranks have.
        """
        batch, local = self.index.shape
        found = torch.full((batch * self.length,), FILL)
        is_token = self.index != FILL
        rows = (torch.arange(batch).unsqueeze(1) * self.length).expand(batch, local)
        found[(rows + self.index)[is_token]] = torch.arange(batch * local).view(batch, local)[is_token]
        return found[positions]


def _runs(row: torch.Tensor) -> list[tuple[int, int]]:
    """Number and length of each document of a row, in order."""
    numbers, lengths = row.unique_consecutive(return_counts=True)
    return list(zip(numbers.tolist(), lengths.tolist(), strict=True))


def _needs_mask(runs: Sequence[tuple[int, int]]) -> bool:
    """Whether a token of a row would see padding or another document under a causal mask alone."""
    return len(runs) > 2 or (len(runs) == 2 and runs[1][0] != 0)


def _chunk(length: int, ring: int) -> int:
    return -(-length // (2 * ring))


def _zigzag(runs: Sequence[tuple[int, int]], place: SequencePlace) -> torch.Tensor:
    """Positions of a ring rank's two chunks of each document of a row."""
    parts, start = [torch.empty(0, dtype=torch.int64)], 0
    for number, length in runs:
        size = _chunk(length, place.ring)
        for chunk in (place.ring_rank, 2 * place.ring - 1 - place.ring_rank) if number else ():
            within = torch.arange(chunk * size, (chunk + 1) * size)
            parts.append(torch.where(within < length, start + within, FILL))
        start += length
    return torch.cat(parts)
