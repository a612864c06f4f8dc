"""Whole matrices out of parts on several ranks: each rank is given some of them whole, and sends the results back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from mindspeed_mm import accelerator

Function = Callable[[torch.Tensor], torch.Tensor]


class MatrixPart(NamedTuple):
    """The part of a matrix that a rank has: first row, number of rows, first column, number of columns."""

    row: int
    rows: int
    column: int
    columns: int

    @property
    def size(self) -> int:
        """Number of values."""
        return self.rows * self.columns

    def of(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return a view of this part of a whole matrix."""
        return matrix[self.row : self.row + self.rows, self.column : self.column + self.columns]


class SplitMatrix(NamedTuple):
    """A matrix of which each rank of a group has a part.

    Attributes:
        rows, columns: of the whole matrix.
        parts: by rank.
    """

    rows: int
    columns: int
    parts: tuple[MatrixPart, ...]


class MatrixRanks:
    """The ranks that together have all parts of some parameters' matrices."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    def split(self, parameters: Sequence[nn.Parameter]) -> list[tuple[MatrixPart, ...]]:
        """Return the parts of each parameter's matrices by rank; a collective.

        Args:
            parameters: the same on all ranks, [rows, columns] or [experts, rows, columns].
        """
        device = accelerator.current().device()
        own = torch.tensor([_own_part(p) for p in parameters], dtype=torch.int64, device=device)
        found = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(found, own, group=self._group)
        by_rank = [part.tolist() for part in found]
        return [tuple(MatrixPart(*numbers[i]) for numbers in by_rank) for i in range(len(parameters))]

    def apply(
        self, function: Function, parts: Sequence[torch.Tensor], matrices: Sequence[SplitMatrix]
    ) -> list[torch.Tensor]:
        """Return this rank's parts of `function(matrix)` for each matrix; a collective.

        Each rank computes a share of the matrices: it is sent all parts of them, and sends the parts of the results
        back.

        Args:
            function: from a matrix to one of the same shape.
            parts: this rank's part of each matrix, all of one dtype and on this process's device.
            matrices: where the parts are; the same on all ranks.
        """
        owners = self._owners(matrices)
        order = sorted(range(len(matrices)), key=owners.__getitem__)
        own = [matrices[i] for i in order if owners[i] == self._rank]
        counts = [sum(parts[i].numel() for i in order if owners[i] == owner) for owner in range(self.size)]
        own_counts = [sum(matrix.parts[rank].size for matrix in own) for rank in range(self.size)]
        received = self._exchange(_joined([parts[i] for i in order], parts[0]), counts, own_counts)

        wholes = [received.new_empty(matrix.rows, matrix.columns) for matrix in own]
        for rank, from_rank in enumerate(received.split(own_counts)):
            sizes = [matrix.parts[rank].size for matrix in own]
            for whole, matrix, values in zip(wholes, own, from_rank.split(sizes), strict=True):
                target = matrix.parts[rank].of(whole)
                target.copy_(values.view_as(target))
        results = [function(whole) for whole in wholes]
        back = [m.parts[rank].of(result) for rank in range(self.size) for m, result in zip(own, results, strict=True)]
        returned = self._exchange(_joined(back, received), own_counts, counts)

        flat = dict(zip(order, returned.split([parts[i].numel() for i in order]), strict=True))
        return [flat[i].view(parts[i].shape) for i in range(len(parts))]

    def _owners(self, matrices: Iterable[SplitMatrix]) -> list[int]:
        """Return the rank that computes each matrix, so that all have about as much to do."""
        work = [0] * self.size
        owners = []
        for matrix in matrices:
            owners.append(work.index(min(work)))
            work[owners[-1]] += matrix.rows * matrix.columns * min(matrix.rows, matrix.columns)
        return owners

    def _exchange(self, sent: torch.Tensor, counts: list[int], arriving: list[int]) -> torch.Tensor:
        received = sent.new_empty(sum(arriving))
        dist.all_to_all_single(received, sent, arriving, counts, group=self._group)
        return received


def _own_part(parameter: nn.Parameter) -> MatrixPart:
    assert isinstance(parameter, DTensor)
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return MatrixPart(offset[-2], shape[-2], offset[-1], shape[-1])


def _joined(tensors: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Return the values of `tensors` one after the other; without any, an empty tensor of the dtype of `like`."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else like.new_empty(0)


class RankGroups:
    """Finds the ranks that have parts of a parameter's matrices, and makes one process group for the same ranks."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], MatrixRanks] = {}

    def of(self, parameter: nn.Parameter) -> MatrixRanks | None:
        """Return the ranks that have parts of a parameter's matrices; None: this rank has all of its matrices whole.

        Stacked matrices [experts, rows, columns] may be split between experts as well: those of other ranks are left
        to them. A collective of the ranks that are found, which all must ask for the same parameters in one order.
        """
        if not isinstance(parameter, DTensor):
            return None
        mesh, whole_in = parameter.device_mesh, {0} if parameter.dim() == 3 else set()
        # Not `is_shard()`: it is False for the strided shards that fully_shard creates of tensor-parallel parameters.
        split = {dim: p for dim, p in enumerate(parameter.placements) if not isinstance(p, Replicate)}
        dims = [dim for dim, p in split.items() if mesh.size(dim) > 1 and p.dim not in whole_in]  # type: ignore[attr-defined]
        if not dims:
            return None
        here = mesh.get_coordinate()
        assert here is not None
        ranks = mesh.mesh[tuple(slice(None) if dim in dims else at for dim, at in enumerate(here))]
        key = tuple(sorted(ranks.flatten().tolist()))
        if key not in self._known:
            # only its members create a group
            group = mesh.get_group(dims[0]) if len(dims) == 1 else None
            group = group or dist.new_group(list(key), use_local_synchronization=True)
            self._known[key] = MatrixRanks(group)
        return self._known[key]
