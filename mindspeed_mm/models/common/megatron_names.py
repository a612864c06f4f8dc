"""Mapping between the parameters of a Megatron-core model and the tensors of the transformers model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

#: name of a layer of Megatron-core → ends of the paths of the transformers layers that it consists of
MEGATRON_LAYERS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj", "attn.qkv"),
    "linear_proj": ("o_proj", "attn.proj"),
    "linear_fc1": ("gate_proj", "up_proj", "merger.mlp.0"),
    "linear_fc2": ("down_proj", "merger.mlp.2"),
}


@dataclass(frozen=True)
class Block:
    """One of several equal blocks of rows (dimension 0) of a source tensor.

    Attributes:
        source: position of the source in `ParamMapping.sources`.
        index: position of the block in the source, from 0.
        of: number of blocks in the source.
    """

    source: int
    index: int
    of: int


@dataclass(frozen=True)
class Rows:
    """`length` rows of the transformers tensor `source`, beginning at row `start`."""

    source: str
    start: int
    length: int


@dataclass(frozen=True)
class ParamMapping:
    """The transformers tensors that a Megatron-core parameter consists of.

    The whole parameter (the parts of the tensor-parallel ranks, concatenated along the dimension that is split)
    consists of blocks of rows of transformers tensors; the other dimensions are the same in both.

    Attributes:
        sources: names of the transformers tensors; each of their rows is in exactly one block.
        blocks: the blocks, from the first row to the last.
    """

    sources: tuple[str, ...]
    blocks: tuple[Block, ...]

    def join(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the whole Megatron-core parameter for the values of the sources."""
        if len(self.blocks) == 1:
            return values[0]
        parts = []
        for block in self.blocks:
            rows = values[block.source].shape[0] // block.of
            parts.append(values[block.source].narrow(0, block.index * rows, rows))
        return torch.cat(parts)

    def split(self, whole: torch.Tensor, row_counts: Sequence[int]) -> list[torch.Tensor]:
        """Return the values of the sources, which have `row_counts` rows, for the whole Megatron-core parameter."""
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
        """Return the origin of the rows of the whole Megatron-core parameter, in order; adjacent ranges are merged.

        Args:
            row_counts: number of rows of each source.
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
    """Map a parameter to one transformers tensor with the same rows in the same order."""
    return ParamMapping((source,), (Block(0, 0, 1),))


def interleaved(sources: Sequence[str], pieces: int) -> ParamMapping:
    """Interleave sources: the first of `pieces` equal parts of each source, then the second of each, and so on.

    So are queries, keys and values stored group by group, and gate and up projections rank by rank.
    """
    return ParamMapping(tuple(sources), tuple(Block(k, i, pieces) for i in range(pieces) for k in range(len(sources))))


def regrouped(source: str, parts: int, pieces: int) -> ParamMapping:
    """Interleave the `parts` equal parts of one source (queries, keys, values), each cut into `pieces` pieces."""
    of = parts * pieces
    return ParamMapping(
        (source,), tuple(Block(0, part * pieces + i, of) for i in range(pieces) for part in range(parts))
    )
