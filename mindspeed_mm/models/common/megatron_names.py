"""Which of transformers' tensors a tensor of a Megatron-core model is made of, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Block:
    """The `index`-th of `of` equal blocks of rows (dimension 0) of a source.

    Attributes:
        source: position in `ParamMapping.sources`.
    """

    source: int
    index: int
    of: int


@dataclass(frozen=True)
class Rows:
    """`length` rows of transformers' tensor `source`, from `start` on."""

    source: str
    start: int
    length: int


@dataclass(frozen=True)
class ParamMapping:
    """How a Megatron-core tensor is made.

    The whole tensor (what the tensor-parallel ranks hold, one after the other along the dimension that is split) is
    made of blocks of rows of transformers' tensors; the other dimensions are the same in both.

    Attributes:
        sources: names of transformers' tensors; every row of theirs is in exactly one block.
        blocks: from the first row to the last.
    """

    sources: tuple[str, ...]
    blocks: tuple[Block, ...]

    def join(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Values of the sources → the whole Megatron-core tensor."""
        if len(self.blocks) == 1:
            return values[0]
        parts = []
        for block in self.blocks:
            rows = values[block.source].shape[0] // block.of
            parts.append(values[block.source].narrow(0, block.index * rows, rows))
        return torch.cat(parts)

    def split(self, whole: torch.Tensor, row_counts: Sequence[int]) -> list[torch.Tensor]:
        """The whole Megatron-core tensor → values of the sources, which have `row_counts` rows."""
        if len(self.blocks) == 1:
            return [whole]
        values = [whole.new_empty((rows, *whole.shape[1:])) for rows in row_counts]
        at = 0
        for block in self.blocks:
            rows = row_counts[block.source] // block.of
            values[block.source].narrow(0, block.index * rows, rows).copy_(whole.narrow(0, at, rows))
            at += rows
        return values

    def rows(self, row_counts: Sequence[int]) -> list[Rows]:
        """Where the rows of the whole Megatron-core tensor come from, in order; neighbours are put together.

        Args:
            row_counts: of the sources.
        """
        found: list[Rows] = []
        for block in self.blocks:
            length = row_counts[block.source] // block.of
            name, start = self.sources[block.source], block.index * length
            last = found[-1] if found else None
            if last is not None and last.source == name and last.start + last.length == start:
                found[-1] = Rows(name, last.start, last.length + length)
            else:
                found.append(Rows(name, start, length))
        return found


def same(source: str) -> ParamMapping:
    """A tensor that is the same in both."""
    return ParamMapping((source,), (Block(0, 0, 1),))


def interleaved(sources: Sequence[str], pieces: int) -> ParamMapping:
    """Rows of the sources in turn, piece by piece: queries, keys and values of a group; gate and up of a rank."""
    return ParamMapping(tuple(sources), tuple(Block(k, i, pieces) for i in range(pieces) for k in range(len(sources))))


def regrouped(source: str, parts: int, pieces: int) -> ParamMapping:
    """A source of `parts` equal parts one after the other (queries, keys, values) → piece by piece of each part."""
    of = parts * pieces
    return ParamMapping(
        (source,), tuple(Block(0, part * pieces + i, of) for i in range(pieces) for part in range(parts))
    )
