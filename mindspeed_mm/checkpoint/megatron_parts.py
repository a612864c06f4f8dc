"""Which rectangles of transformers' tensors a rank holds in the parameters of Megatron-core chunks.

A rank holds a part of a parameter's rows or columns (tensor parallelism), and may own a range of its elements only (the
distributed optimizer, sharing the writing of a checkpoint). Either falls into rectangles of transformers' tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mindspeed_mm.checkpoint.lazy import Region, whole
from mindspeed_mm.models.common.megatron_names import Made, same
from mindspeed_mm.models.contract import Staged
from mindspeed_mm.utils.errors import CheckpointError

Shape = tuple[int, ...]
FlatRange = tuple[int, int]
"""First element and the one after the last, of a flattened parameter of this rank."""


@dataclass(frozen=True)
class SourceRegion:
    """A rectangle of a transformers' tensor that this rank holds.

    Attributes:
        source: name of the transformers' tensor.
        region: of it.
        pieces: rectangles of the rank's parameter whose rows, one after the other, are `region`.
        shape: of the rank's parameter.
        span: elements of it that the tensors given below hold, flattened, where they don't have its shape.
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
        """The rectangle's values in `tensor`: a view where they lie in one piece.

        Args:
            tensor: of the shape of the rank's parameter, or the flat elements of its span.
        """
        views = [self._view(tensor, piece) for piece in self.pieces]
        return views[0] if len(views) == 1 else torch.cat(views)

    def put(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Write the rectangle's values into `tensor`, converted to its dtype; arguments as `value`'s."""
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
class Held:
    """A parameter of a chunk on this rank.

    Attributes:
        made: how the whole tensor is made.
        offset: where the rank's rows (or columns) begin in the whole tensor, by dimension.
        size: of the whole tensor.
        rows: number of rows of each source; empty for a single source, which is the whole tensor.
        is_copy: another stage holds the same tensor and answers for it: the head's copy of a tied embedding.
    """

    param: nn.Parameter
    made: Made
    offset: Shape
    size: Shape
    rows: Shape
    is_copy: bool

    @property
    def is_split(self) -> bool:
        """Whether the tensor-parallel ranks hold different parts."""
        return bool(getattr(self.param, "tensor_model_parallel", False))

    def parts(self, span: FlatRange | None = None) -> list[SourceRegion]:
        """The rectangles that this rank's parameter, or elements `span` of it, consists of; neighbours are one."""
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
        """(source, region of it, piece of the parameter) that a piece of the parameter falls into."""
        region = tuple((start + by, length) for (start, length), by in zip(piece, self.offset, strict=True))
        if not self.rows:
            return [(self.made.sources[0], region, piece)]
        (start, length), base, found = region[0], 0, []
        for rows in self.made.rows(self.rows):
            low, high = max(start, base), min(start + length, base + rows.length)
            if low < high:
                inner = ((rows.start + low - base, high - low), *region[1:])
                found.append((rows.source, inner, ((low - self.offset[0], high - low), *piece[1:])))
            base += rows.length
        return found


def rectangles(shape: Sequence[int], start: int, end: int) -> list[Region]:
    """The rectangles that elements `start` to `end` of a contiguous tensor fall into, in their order."""
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


def hold(
    chunks: Sequence[nn.Module], shapes: Mapping[str, Shape] | None, tensor_rank: int, tensor_size: int
) -> list[Held]:
    """Say what this rank's chunks hold.

    Args:
        chunks: with `made_of`, or without: then a tensor has the name that it has in the whole model.
        shapes: of transformers' tensors, by name; None: tensors are none of transformers'.

    Raises:
        CheckpointError: a chunk's tensor is made of tensors that the transformers model has not, or of another shape.
    """
    held = []
    for chunk in chunks:
        made_of = Staged(chunk).made_of or own_names(chunk)
        for name, param in chunk.named_parameters():
            made = made_of(name)
            offset, size = [0] * param.dim(), list(param.shape)
            if getattr(param, "tensor_model_parallel", False):
                dim = param.partition_dim  # type: ignore[attr-defined]
                offset[dim], size[dim] = tensor_rank * size[dim], tensor_size * size[dim]
            rows = _rows_of(name, made, tuple(size), shapes)
            is_copy = bool(getattr(param, "shared", False))
            held.append(Held(param, made, tuple(offset), tuple(size), rows, is_copy))
    return held


def _rows_of(name: str, made: Made, size: Shape, shapes: Mapping[str, Shape] | None) -> Shape:
    if shapes is None:
        return ()
    missing = [s for s in made.sources if s not in shapes]
    if missing:
        raise CheckpointError(f"{name} is made of {missing[0]}, which the transformers model does not have")
    single = len(made.blocks) == 1
    rows = () if single else tuple(shapes[s][0] for s in made.sources)
    expected = shapes[made.sources[0]] if single else (sum(rows), *shapes[made.sources[0]][1:])
    if expected != size:
        raise CheckpointError(
            f"{' and '.join(made.sources)} give a tensor of shape {expected}, and {name} is {size} as a whole: "
            "configuration and weights don't belong together"
        )
    return rows


def own_names(chunk: nn.Module) -> Callable[[str], Made]:
    """Names for a chunk of plain Megatron-core modules: its own, layers with their numbers in the whole model."""
    numbers = {
        name: module.layer_number - 1
        for name, module in chunk.named_modules()
        if name.rsplit(".", 1)[-1].isdigit() and isinstance(getattr(module, "layer_number", None), int)
    }
    tied = Staged(chunk).has_tied_head

    def name_of(name: str) -> Made:
        if tied and name.endswith("output_layer.weight"):
            return same(name.removesuffix("output_layer.weight") + "embedding.word_embeddings.weight")
        for layer, number in numbers.items():
            if name.startswith(f"{layer}."):
                return same(f"{layer.rsplit('.', 1)[0]}.{number}{name.removeprefix(layer)}")
        return same(name)

    return name_of


def _joined(pairs: Sequence[tuple[Region, Region]]) -> list[tuple[Region, tuple[Region, ...]]]:
    """(region of the source, piece of the parameter) → with regions that are neighbours by their rows put together."""
    found: list[tuple[Region, list[Region]]] = []
    for region, piece in sorted(pairs, key=lambda pair: pair[0]):
        last = found[-1] if found else None
        if last and region and last[0][1:] == region[1:] and sum(last[0][0]) == region[0][0]:
            found[-1] = (((last[0][0][0], last[0][0][1] + region[0][1]), *region[1:]), [*last[1], piece])
        else:
            found.append((region, [piece]))
    return [(region, tuple(pieces)) for region, pieces in found]


@dataclass(frozen=True)
class Stepped:
    """What the optimizer steps on this rank of a parameter.

    Attributes:
        main: the tensor that it steps, float32: the parameter, a part of it, or a copy in higher precision.
        span: the elements of the parameter that `main` is.
        group: its parameter group.
        state: its state, by name.
    """

    main: torch.Tensor
    span: FlatRange
    group: dict[str, Any]
    state: dict[str, Any]


def to_write(
    held: Sequence[Held],
    stepped: Mapping[nn.Parameter, Stepped],
    *,
    spread: bool,
    tensor_rank: int,
    data_rank: int,
    data_size: int,
) -> list[tuple[Held, FlatRange]]:
    """What this rank writes, so that every element is written exactly once by all of them.

    Args:
        stepped: by parameter.
        spread: whether each data-parallel rank steps a range of elements of its own; else replicas share the writing.
    """
    mine = [h for h in held if not h.is_copy and (h.is_split or tensor_rank == 0)]
    owned = [h for h in mine if spread and h.param.requires_grad]
    spans = [(h, stepped[h.param].span) for h in owned if h.param in stepped]
    shared = [h for h in mine if not (spread and h.param.requires_grad)]
    total = sum(h.param.numel() for h in shared)
    first, end, base = total * data_rank // data_size, total * (data_rank + 1) // data_size, 0
    for h in shared:
        low, high = max(first - base, 0), min(end - base, h.param.numel())
        base += h.param.numel()
        if low < high:
            spans.append((h, (low, high)))
    return spans


def parameters(held: Sequence[Held]) -> list[tuple[SourceRegion, torch.Tensor]]:
    """All that this rank holds of the parameters, part by part."""
    return [(part, h.param.data) for h in held for part in h.parts()]


def precise_copies(
    held: Sequence[Held], stepped: Mapping[nn.Parameter, Stepped]
) -> list[tuple[SourceRegion, torch.Tensor]]:
    """All that the optimizer holds here of parameters in a higher precision than theirs, part by part."""
    found = []
    for h in held:
        copy = stepped.get(h.param)
        if copy is not None and copy.main.dtype != h.param.dtype:
            found += [(part, copy.main.data) for part in h.parts(copy.span)]
    return found
