"""Lazy tensors: expressions over the tensors of a source, of which any region can be read without the whole.

transformers converts weights between the hub's layout and that of its modules (renamed, stacked, concatenated,
transposed) with operations on tensors. Applied to `LazyTensor`s, these operations move no data but build an expression
over the source's tensors. A rank then reads only the region of its shard, which is pushed down through concatenations,
stacks, slices and permutations to slices of files. An operation without such a rule is computed whole, from its inputs,
when a region of its result is read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

# A part of a tensor: (start, length) of every dimension.
Region = tuple[tuple[int, int], ...]


def whole(shape: Sequence[int]) -> Region:
    """Return the region of a whole tensor."""
    return tuple((0, int(size)) for size in shape)


class Node:
    """An expression with one tensor as value.

    Attributes:
        shape, dtype: shape and dtype of the value.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, region: Region) -> torch.Tensor:
        """Return the value of `region`; it may share memory with a mapped file and must not be written to."""
        out = torch.empty([length for _, length in region], dtype=self.dtype)
        self.read_into(region, out)
        return out

    def read_into(self, region: Region, out: torch.Tensor) -> None:
        """Write the value of `region` into `out`, converted to its dtype and moved to its device."""
        out.copy_(self.read(region))

    def inputs(self) -> Sequence[Node]:
        """Return the inputs of this expression."""
        parts: Sequence[Node] | None = getattr(self, "parts", None)
        return parts if parts is not None else [self.parent]  # type: ignore[attr-defined]

    def leaves(self) -> set[str]:
        """Return the names of the source's tensors that this expression depends on."""
        found, todo, seen = set(), [self], set()
        while todo:
            node = todo.pop()
            if isinstance(node, Leaf):
                found.add(node.name)
            elif id(node) not in seen:
                seen.add(id(node))
                todo += node.inputs()
        return found


class Leaf(Node):
    """A tensor of the source."""

    def __init__(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        reader: Callable[[str, Region], torch.Tensor],
        keeps_dtype: bool = False,
    ) -> None:
        """
        Args:
            reader: (name, region) → value of the region in host memory.
            keeps_dtype: ignore casts of this tensor. (transformers' loader casts what it reads to its model's dtype;
                here the final reader converts values.)
        """
        self.name, self.shape, self.dtype, self._reader = name, tuple(shape), dtype, reader
        self.keeps_dtype = keeps_dtype

    def read(self, region: Region) -> torch.Tensor:
        """See Node."""
        return self._reader(self.name, region)

    def inputs(self) -> Sequence[Node]:
        """See Node."""
        return ()


class _Join(Node):
    """torch.cat."""

    def __init__(self, parts: Sequence[Node], dim: int) -> None:
        self.parts, self.dim = parts, dim
        shape = list(parts[0].shape)
        shape[dim] = sum(p.shape[dim] for p in parts)
        self.shape, self.dtype = tuple(shape), parts[0].dtype

    def read(self, region: Region) -> torch.Tensor:
        hit = self._hit(region)
        return hit[0][0].read(hit[0][1]) if len(hit) == 1 else super().read(region)

    def read_into(self, region: Region, out: torch.Tensor) -> None:
        for part, inner, at in self._hit(region):
            part.read_into(inner, out.narrow(self.dim, at, inner[self.dim][1]))

    def _hit(self, region: Region) -> list[tuple[Node, Region, int]]:
        (start, length), found, base = region[self.dim], [], 0
        for part in self.parts:
            size = part.shape[self.dim]
            low, high = max(start, base), min(start + length, base + size)
            if low < high:
                inner = (*region[: self.dim], (low - base, high - low), *region[self.dim + 1 :])
                found.append((part, inner, low - start))
            base += size
        return found


class _Stack(Node):
    """torch.stack."""

    def __init__(self, parts: Sequence[Node], dim: int) -> None:
        self.parts, self.dim, self.dtype = parts, dim, parts[0].dtype
        shape = list(parts[0].shape)
        shape.insert(dim, len(parts))
        self.shape = tuple(shape)

    def read_into(self, region: Region, out: torch.Tensor) -> None:
        start, length = region[self.dim]
        inner = (*region[: self.dim], *region[self.dim + 1 :])
        for i in range(length):
            self.parts[start + i].read_into(inner, out.select(self.dim, i))


class _Narrow(Node):
    """A slice without steps along one dimension."""

    def __init__(self, parent: Node, dim: int, start: int, length: int) -> None:
        self.parent, self.dim, self.start, self.dtype = parent, dim, start, parent.dtype
        self.shape = (*parent.shape[:dim], length, *parent.shape[dim + 1 :])

    def read(self, region: Region) -> torch.Tensor:
        return self.parent.read(self._inner(region))

    def read_into(self, region: Region, out: torch.Tensor) -> None:
        self.parent.read_into(self._inner(region), out)

    def _inner(self, region: Region) -> Region:
        start, length = region[self.dim]
        return (*region[: self.dim], (self.start + start, length), *region[self.dim + 1 :])


class _Select(Node):
    """One index of a dimension, which is dropped."""

    def __init__(self, parent: Node, dim: int, index: int) -> None:
        self.parent, self.dim, self.index, self.dtype = parent, dim, index, parent.dtype
        self.shape = (*parent.shape[:dim], *parent.shape[dim + 1 :])

    def read(self, region: Region) -> torch.Tensor:
        return self.parent.read(self._inner(region)).squeeze(self.dim)

    def read_into(self, region: Region, out: torch.Tensor) -> None:
        self.parent.read_into(self._inner(region), out.unsqueeze(self.dim))

    def _inner(self, region: Region) -> Region:
        return (*region[: self.dim], (self.index, 1), *region[self.dim :])


class _Unsqueeze(Node):
    def __init__(self, parent: Node, dim: int) -> None:
        self.parent, self.dim, self.dtype = parent, dim, parent.dtype
        self.shape = (*parent.shape[:dim], 1, *parent.shape[dim:])

    def read(self, region: Region) -> torch.Tensor:
        value = self.parent.read((*region[: self.dim], *region[self.dim + 1 :])).unsqueeze(self.dim)
        return value.narrow(self.dim, *region[self.dim])

    def read_into(self, region: Region, out: torch.Tensor) -> None:
        if region[self.dim][1]:
            self.parent.read_into((*region[: self.dim], *region[self.dim + 1 :]), out.squeeze(self.dim))


class _Permute(Node):
    def __init__(self, parent: Node, order: Sequence[int]) -> None:
        self.parent, self.order, self.dtype = parent, tuple(order), parent.dtype
        self.shape = tuple(parent.shape[d] for d in self.order)
        self._back = [self.order.index(d) for d in range(len(self.order))]

    def read(self, region: Region) -> torch.Tensor:
        return self.parent.read(tuple(region[i] for i in self._back)).permute(self.order)

    def read_into(self, region: Region, out: torch.Tensor) -> None:
        self.parent.read_into(tuple(region[i] for i in self._back), out.permute(self._back))


class _Cast(Node):
    def __init__(self, parent: Node, dtype: torch.dtype) -> None:
        self.parent, self.shape, self.dtype = parent, parent.shape, dtype

    def read(self, region: Region) -> torch.Tensor:
        return self.parent.read(region).to(self.dtype)

    def read_into(self, region: Region, out: torch.Tensor) -> None:
        loses_nothing = torch.promote_types(self.parent.dtype, self.dtype) == self.dtype
        if out.dtype == self.dtype or loses_nothing:
            self.parent.read_into(region, out)
        else:
            super().read_into(region, out)


class _Call:
    """An operation without a rule: computed from whole inputs; each thread caches its last result."""

    def __init__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs

    def value(self) -> Any:
        if getattr(_kept, "call", None) is not self:
            args, kwargs = tree_map(_compute, (self.args, self.kwargs))
            _kept.call, _kept.value = self, self.func(*args, **kwargs)
        return _kept.value


_kept = threading.local()


def forget() -> None:
    """Release this thread's cached result."""
    _kept.__dict__.clear()


class _Result(Node):
    """An output of a call."""

    def __init__(self, call: _Call, index: int | None, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.call, self.index, self.shape, self.dtype = call, index, tuple(shape), dtype

    def read(self, region: Region) -> torch.Tensor:
        value = self.call.value()
        value = value if self.index is None else value[self.index]
        return _part(value, region)

    def inputs(self) -> Sequence[Node]:
        values = tree_flatten((self.call.args, self.call.kwargs))[0]
        return [v.node for v in values if isinstance(v, LazyTensor)]


def _compute(value: object) -> Any:
    # contiguous, as the LazyTensor that the operation was applied to had contiguous strides
    return value.node.read(whole(value.node.shape)).contiguous() if isinstance(value, LazyTensor) else value


class LazyTensor(torch.Tensor):
    """A tensor without data: a shape, a dtype and the expression of its value."""

    node: Node

    @staticmethod
    def __new__(cls, node: Node) -> LazyTensor:
        tensor = torch.Tensor._make_wrapper_subclass(cls, node.shape, dtype=node.dtype, device="cpu")
        tensor.node = node
        return tensor

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"LazyTensor(shape={tuple(self.shape)}, dtype={self.dtype}, {type(self.node).__name__})"

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        rule = _RULES.get(func)
        result = rule(*args, **kwargs) if rule is not None else None
        return _unruled(func, args, kwargs) if result is None else result


def leaf(
    name: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    reader: Callable[[str, Region], torch.Tensor],
    keeps_dtype: bool = False,
) -> LazyTensor:
    """Return a lazy tensor that is read from a source; the arguments are those of `Leaf`."""
    return LazyTensor(Leaf(name, shape, dtype, reader, keeps_dtype))


def computed(func: Callable[..., torch.Tensor], inputs: Sequence[LazyTensor], dtype: torch.dtype) -> LazyTensor:
    """Return a lazy tensor with the shape of the first input; it is computed whole, from whole inputs.

    Args:
        func: (values of the inputs) → the value.
        dtype: of the result of `func`.
    """
    return LazyTensor(_Result(_Call(func, tuple(inputs), {}), None, inputs[0].shape, dtype))


def rounded(node: Node, dtype: torch.dtype) -> Node:
    """Return the expression with its values rounded to `dtype`, in its original dtype."""
    return _Cast(_Cast(node, dtype), node.dtype)


def _unruled(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def on_meta(value: object) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty(value.shape, dtype=value.dtype, device="meta")
        return torch.device("meta") if isinstance(value, torch.device) else value

    call = _Call(func, args, kwargs)
    try:
        shapes = func(*tree_map(on_meta, args), **tree_map(on_meta, kwargs))
    except (RuntimeError, NotImplementedError):
        return call.value()  # the result depends on values: computed at once
    if isinstance(shapes, torch.Tensor):
        return LazyTensor(_Result(call, None, shapes.shape, shapes.dtype))
    if isinstance(shapes, (list, tuple)) and all(isinstance(s, torch.Tensor) for s in shapes):
        return [LazyTensor(_Result(call, i, s.shape, s.dtype)) for i, s in enumerate(shapes)]
    return call.value()


def _node(value: torch.Tensor) -> Node:
    if isinstance(value, LazyTensor):
        return value.node
    return Leaf("constant", value.shape, value.dtype, lambda _, region: _part(value.detach(), region))


def _part(value: torch.Tensor, region: Region) -> torch.Tensor:
    for dim, (start, length) in enumerate(region):
        value = value.narrow(dim, start, length)
    return value


def _dim(dim: int, ndim: int) -> int:
    return dim + ndim if dim < 0 else dim


def _same(tensor: torch.Tensor, **kwargs: Any) -> LazyTensor:
    return LazyTensor(_node(tensor))


def _cast(tensor: torch.Tensor, *, dtype: torch.dtype | None = None, **kwargs: Any) -> LazyTensor:
    node = _node(tensor)
    kept = dtype is None or dtype == node.dtype or (isinstance(node, Leaf) and node.keeps_dtype)
    return LazyTensor(node if kept or dtype is None else _Cast(node, dtype))


def _cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> LazyTensor | None:
    if len({t.dtype for t in tensors}) > 1 or len({t.dim() for t in tensors}) > 1:
        return None
    return LazyTensor(_Join([_node(t) for t in tensors], _dim(dim, tensors[0].dim())))


def _stack(tensors: Sequence[torch.Tensor], dim: int = 0) -> LazyTensor | None:
    if len({t.dtype for t in tensors}) > 1:
        return None
    return LazyTensor(_Stack([_node(t) for t in tensors], _dim(dim, tensors[0].dim() + 1)))


def _slice(
    tensor: torch.Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> LazyTensor | None:
    if step != 1:
        return None
    dim = _dim(dim, tensor.dim())
    low, high, _ = slice(start, end).indices(tensor.shape[dim])
    return LazyTensor(_Narrow(_node(tensor), dim, low, max(high - low, 0)))


def _select(tensor: torch.Tensor, dim: int, index: int) -> LazyTensor:
    dim = _dim(dim, tensor.dim())
    return LazyTensor(_Select(_node(tensor), dim, index + tensor.shape[dim] if index < 0 else index))


def _unbind(tensor: torch.Tensor, dim: int = 0) -> list[LazyTensor]:
    return [_select(tensor, dim, i) for i in range(tensor.shape[dim])]


def _split(tensor: torch.Tensor, size: int | Sequence[int], dim: int = 0) -> list[LazyTensor]:
    dim = _dim(dim, tensor.dim())
    total = tensor.shape[dim]
    sizes = [min(size, total - i) for i in range(0, total, size)] if isinstance(size, int) else list(size)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [LazyTensor(_Narrow(_node(tensor), dim, start, n)) for start, n in zip(starts, sizes)]


def _transpose(tensor: torch.Tensor, a: int, b: int) -> LazyTensor:
    order = list(range(tensor.dim()))
    a, b = _dim(a, tensor.dim()), _dim(b, tensor.dim())
    order[a], order[b] = b, a
    return LazyTensor(_Permute(_node(tensor), order))


def _permute(tensor: torch.Tensor, order: Sequence[int]) -> LazyTensor:
    return LazyTensor(_Permute(_node(tensor), [_dim(d, tensor.dim()) for d in order]))


def _t(tensor: torch.Tensor) -> LazyTensor:
    return _same(tensor) if tensor.dim() < 2 else _transpose(tensor, 0, 1)


def _squeeze(tensor: torch.Tensor, dim: int) -> LazyTensor:
    dim = _dim(dim, tensor.dim())
    return LazyTensor(_Select(_node(tensor), dim, 0)) if tensor.shape[dim] == 1 else _same(tensor)


def _unsqueeze(tensor: torch.Tensor, dim: int) -> LazyTensor:
    return LazyTensor(_Unsqueeze(_node(tensor), _dim(dim, tensor.dim() + 1)))


_aten = torch.ops.aten
_RULES: dict[Any, Callable[..., Any]] = {
    _aten.alias.default: _same,
    _aten.detach.default: _same,
    _aten.clone.default: _same,
    _aten.lift_fresh.default: _same,
    _aten._to_copy.default: _cast,
    _aten.cat.default: _cat,
    _aten.stack.default: _stack,
    _aten.slice.Tensor: _slice,
    _aten.select.int: _select,
    _aten.unbind.int: _unbind,
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split,
    _aten.transpose.int: _transpose,
    _aten.permute.default: _permute,
    _aten.t.default: _t,
    _aten.squeeze.dim: _squeeze,
    _aten.unsqueeze.default: _unsqueeze,
}
