"""Pieces of a tensor that a rank writes into a torch_dcp folder: rectangles whose values are computed on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from mindspeed_mm.checkpoint.lazy import Region


@dataclass(frozen=True)
class StoredRegion:
    """A rectangle of a tensor.

    Attributes:
        region: its place in the whole tensor.
        value: returns its values; they may be a view of a tensor that training changes.
    """

    region: Region
    value: Callable[[], torch.Tensor]


class StoredPieces:
    """The pieces of a tensor that this rank writes; torch's planner calls `__create_write_items__`."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, pieces: Sequence[StoredRegion]) -> None:
        """
        Args:
            shape: shape of the whole tensor.
            dtype: dtype of the whole tensor.
            pieces: disjoint rectangles.
        """
        self.shape, self.dtype = tuple(shape), dtype
        self.pieces = {tuple(start for start, _ in piece.region): piece for piece in pieces}

    def __iter__(self) -> Iterator[StoredRegion]:
        return iter(self.pieces.values())

    def at(self, index: MetadataIndex) -> torch.Tensor:
        """Return the values of the piece at the offset of `index`."""
        return self.pieces[tuple(index.offset or ())].value()

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        return [self._write_item(name, piece) for piece in self.pieces.values()]

    def _write_item(self, name: str, piece: StoredRegion) -> WriteItem:
        start = torch.Size([s for s, _ in piece.region])
        sizes = torch.Size([n for _, n in piece.region])
        data = TensorWriteData(
            chunk=ChunkStorageMetadata(start, sizes),
            properties=TensorProperties(dtype=self.dtype),
            size=torch.Size(self.shape),
        )
        return WriteItem(MetadataIndex(name, start), WriteItemType.SHARD, tensor_data=data)
