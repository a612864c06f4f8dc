"""The rectangles of transformers' tensors that a rank has in the parameters of Megatron-core chunks.

A rank has a part of a parameter's rows or columns (tensor parallelism), or only a range of its elements (the
distributed optimizer, or data-parallel ranks that share the writing of a checkpoint). Both split into rectangles of
transformers' tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mindspeed_mm.checkpoint.lazy import Region, whole
from mindspeed_mm.models.common.megatron_names import ParamMapping, same
from mindspeed_mm.models.contract import Staged
from mindspeed_mm.utils.errors import CheckpointError

Shape = tuple[int, ...]
FlatRange = tuple[int, int]
"""Start and end (exclusive) of a range of elements of this rank's flattened parameter."""


@dataclass(frozen=True)
class SourceRegion:
    """A rectangle of a transformers tensor on this rank.

    Attributes:
        source: name of the transformers tensor.
        region: rectangle of the transformers tensor.
        pieces: rectangles of the rank's parameter; their concatenation along the rows is `region`.
        shape: shape of the rank's parameter.
        span: range of the parameter's elements that a flat tensor argument of the methods contains.
    """

    source: str
    region: Region
    pieces: tuple[Region, ...]
    shape: Shape
    span: FlatRange

    @property
    def sizes(self) -> Shape:
        """Shape of the rectangle."""
        return tuple(length for _, length in self.region)

    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the rectangle's values in `tensor`: a view if there is one piece.

        Args:
            tensor: a tensor of shape `shape`, or the flat elements of `span`.
        """
        views = [self._view(tensor, piece) for piece in self.pieces]
        return views[0] if len(views) == 1 else torch.cat(views)

    def put(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Write the rectangle's values into `tensor` (see `value`), converted to its dtype."""
        at = 0
        for piece in self.pieces:
            view = self._view(tensor, piece)
            if view.dim() == 0 or len(self.pieces) == 1:
                view.copy_(value)
            else:
                view.copy_(value.narrow(0, at, len(view)))
                at += len(view)

    def _view(self, tensor: torch.Tensor, piece: Region) -> torch.Tensor:
        if tuple(tensor.shape) == self.shape:
            for dim, (start, length) in enumerate(piece):
                tensor = tensor.narrow(dim, start, length)
            return tensor
        first = sum(s * math.prod(self.shape[d + 1 :]) for d, (s, _) in enumerate(piece)) - self.span[0]
        lengths = [length for _, length in piece]
        return tensor.view(-1).narrow(0, first, math.prod(lengths)).view(lengths)


@dataclass(frozen=True, eq=False)
class LocalParameter:
    """A parameter of a chunk on this rank.

    Attributes:
        param: the parameter.
        mapping: the composition of the whole tensor from transformers tensors.
        offset: offset of the rank's part in the whole tensor, by dimension.
        size: shape of the whole tensor.
        rows: number of rows of each source; empty for a single source, which is the whole tensor.
        is_copy: whether another stage has and saves the same tensor: the head's copy of a tied embedding.
    """

    param: nn.Parameter
    mapping: ParamMapping
    offset: Shape
    size: Shape
    rows: Shape
    is_copy: bool

    @property
    def is_split(self) -> bool:
        """Whether the tensor-parallel ranks have different parts."""
        return bool(getattr(self.param, "tensor_model_parallel", False))

    def parts(self, span: FlatRange | None = None) -> list[SourceRegion]:
        """Return the rectangles of this rank's parameter, or of its elements `span`; adjacent ones are joined."""
        shape = tuple(self.param.shape)
        first, end = span or (0, self.param.numel())
        found: dict[str, list[tuple[Region, Region]]] = {}
        for piece in rectangles(shape, first, end):
            for source, region, part in self._in_sources(piece):
                found.setdefault(source, []).append((region, part))
        return [
            SourceRegion(source, region, pieces, shape, (first, end))
            for source, pairs in found.items()
            for region, pieces in _joined(pairs)
        ]

    def _in_sources(self, piece: Region) -> list[tuple[str, Region, Region]]:
        """Split a piece of the parameter by sources: (source, region of the source, piece of the parameter)."""
        region = tuple((start + by, length) for (start, length), by in zip(piece, self.offset, strict=True))
        if not self.rows:
            return [(self.mapping.sources[0], region, piece)]
        (start, length), base, found = region[0], 0, []
        for rows in self.mapping.rows(self.rows):
            low, high = max(start, base), min(start + length, base + rows.length)
            if low < high:
                inner = ((rows.start + low - base, high - low), *region[1:])
                found.append((rows.source, inner, ((low - self.offset[0], high - low), *piece[1:])))
            base += rows.length
        return found


def rectangles(shape: Sequence[int], start: int, end: int) -> list[Region]:
    """Split elements `start` to `end` (exclusive) of a contiguous tensor into rectangles, in order."""
    shape = tuple(shape)
    if start >= end:
        return []
    if len(shape) < 2:
        return [((start, end - start),) if shape else ()]
    row = math.prod(shape[1:])
    first, last = -(-start // row), end // row  # whole rows
    if first > last:  # inside a single row
        return [((last, 1), *r) for r in rectangles(shape[1:], start - last * row, end - last * row)]
    found: list[Region] = []
    if start % row:
        found += [((first - 1, 1), *r) for r in rectangles(shape[1:], start % row, row)]
    if first < last:
        found.append(((first, last - first), *whole(shape[1:])))
    if end % row:
        found += [((last, 1), *r) for r in rectangles(shape[1:], 0, end % row)]
    return found


def local_parameters(
    chunks: Sequence[nn.Module], shapes: Mapping[str, Shape] | None, tensor_rank: int, tensor_size: int
) -> list[LocalParameter]:
    """Return the parameters of this rank's chunks.

    Args:
        chunks: a chunk without `param_mapping` stores its tensors under their names in the whole model.
        shapes: shapes of transformers' tensors by name; None: the model is no transformers model.
        tensor_rank, tensor_size: tensor-parallel rank and size.

    Raises:
        CheckpointError: the transformers model lacks a source of a chunk's tensor, or has it in another shape.
    """
    found = []
    for chunk in chunks:
        param_mapping = Staged(chunk).param_mapping or own_names(chunk)
        for name, param in chunk.named_parameters():
            mapping = param_mapping(name)
            offset, size = [0] * param.dim(), list(param.shape)
            if getattr(param, "tensor_model_parallel", False):
                dim = param.partition_dim  # type: ignore[attr-defined]
                offset[dim], size[dim] = tensor_rank * size[dim], tensor_size * size[dim]
            rows = _rows_of(name, mapping, tuple(size), shapes)
            is_copy = bool(getattr(param, "shared", False))
            found.append(LocalParameter(param, mapping, tuple(offset), tuple(size), rows, is_copy))
    return found


def _rows_of(name: str, mapping: ParamMapping, size: Shape, shapes: Mapping[str, Shape] | None) -> Shape:
    if shapes is None:
        return ()
    missing = [s for s in mapping.sources if s not in shapes]
    if missing:
        raise CheckpointError(f"{name} consists of {missing[0]}, which the transformers model does not have")
    single = len(mapping.blocks) == 1
    rows = () if single else tuple(shapes[s][0] for s in mapping.sources)
    expected = shapes[mapping.sources[0]] if single else (sum(rows), *shapes[mapping.sources[0]][1:])
    if expected != size:
        raise CheckpointError(
            f"{' and '.join(mapping.sources)} give a tensor of shape {expected}, and {name} is {size} as a whole: "
            "configuration and weights don't belong together"
        )
    return rows


def own_names(chunk: nn.Module) -> Callable[[str], ParamMapping]:
    """Return the naming of a chunk of plain Megatron-core modules: its names, with layer numbers of the whole model."""
    numbers = {
        name: module.layer_number - 1
        for name, module in chunk.named_modules()
        if name.rsplit(".", 1)[-1].isdigit() and isinstance(getattr(module, "layer_number", None), int)
    }
    tied = Staged(chunk).has_tied_head

    def name_of(name: str) -> ParamMapping:
        if tied and name.endswith("output_layer.weight"):
            return same(name.removesuffix("output_layer.weight") + "embedding.word_embeddings.weight")
        for layer, number in numbers.items():
            if name.startswith(f"{layer}."):
                return same(f"{layer.rsplit('.', 1)[0]}.{number}{name.removeprefix(layer)}")
        return same(name)

    return name_of


def _joined(pairs: Sequence[tuple[Region, Region]]) -> list[tuple[Region, tuple[Region, ...]]]:
    """Join regions of the source whose rows are adjacent, and collect their pieces of the parameter."""
    found: list[tuple[Region, list[Region]]] = []
    for region, piece in sorted(pairs, key=lambda pair: pair[0]):
        last = found[-1] if found else None
        if last and region and last[0][1:] == region[1:] and sum(last[0][0]) == region[0][0]:
            found[-1] = (((last[0][0][0], last[0][0][1] + region[0][1]), *region[1:]), [*last[1], piece])
        else:
            found.append((region, [piece]))
    return [(region, tuple(pieces)) for region, pieces in found]


@dataclass(frozen=True)
class MainParameter:
    """The part of a parameter that the optimizer steps on this rank.

    Attributes:
        main: the tensor that is stepped, float32: the parameter, a part of it, or its master weights.
        span: range of the parameter's elements in `main`.
        group: its parameter group.
        state: its optimizer state, by name.
    """

    main: torch.Tensor
    span: FlatRange
    group: dict[str, Any]
    state: dict[str, Any]


def to_write(
    local: Sequence[LocalParameter],
    mains: Mapping[nn.Parameter, MainParameter],
    *,
    spread: bool,
    tensor_rank: int,
    data_rank: int,
    data_size: int,
) -> list[tuple[LocalParameter, FlatRange]]:
    """Return the ranges that this rank writes, so that all ranks together write every element exactly once.

    Args:
        local: parameters of this rank.
        mains: what the optimizer steps, by parameter.
        spread: whether the distributed optimizer gives each data-parallel rank a range of elements, which that rank
            writes; False: data-parallel ranks split the writing evenly.
        tensor_rank: tensor-parallel rank.
        data_rank, data_size: data-parallel rank and size.
    """
    mine = [p for p in local if not p.is_copy and (p.is_split or tensor_rank == 0)]
    owned = [p for p in mine if spread and p.param.requires_grad]
    spans = [(p, mains[p.param].span) for p in owned if p.param in mains]
    shared = [p for p in mine if not (spread and p.param.requires_grad)]
    total = sum(p.param.numel() for p in shared)
    first, end, base = total * data_rank // data_size, total * (data_rank + 1) // data_size, 0
    for p in shared:
        low, high = max(first - base, 0), min(end - base, p.param.numel())
        base += p.param.numel()
        if low < high:
            spans.append((p, (low, high)))
    return spans


def parameter_parts(local: Sequence[LocalParameter]) -> list[tuple[SourceRegion, torch.Tensor]]:
    """Return the rectangles of this rank's parameters, with the tensors that contain them."""
    return [(part, p.param.data) for p in local for part in p.parts()]


def master_weight_parts(
    local: Sequence[LocalParameter], mains: Mapping[nn.Parameter, MainParameter]
) -> list[tuple[SourceRegion, torch.Tensor]]:
    """Return the rectangles of the master weights on this rank, with the tensors that contain them."""
    found = []
    for p in local:
        main = mains.get(p.param)
        if main is not None and main.main.dtype != p.param.dtype:
            found += [(part, main.main.data) for part in p.parts(main.span)]
    return found
