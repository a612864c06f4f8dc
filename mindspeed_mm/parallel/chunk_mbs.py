"""Chunked micro-batches: a module runs its forward pass on some rows of a micro-batch at a time.

The module's parameters are gathered once for all chunks, in forward and in backward, and the memory of its recomputed
activations is that of one chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from mindspeed_mm.utils.errors import ConfigError


@runtime_checkable
class RowWise(Protocol):
    """An argument that knows itself what of it belongs to some of the rows; it is always split."""

    def of_rows(self, start: int, count: int) -> Any:
        """Return what belongs to `count` rows from row `start` on."""


@dataclass(frozen=True)
class ChunkPlan:
    """How the inputs of modules are split.

    Attributes:
        size: rows of a chunk.
        dim: dimension of the rows.
        args: positions of the positional arguments that are split.
        kwargs: names of the keyword arguments that are split.
        where: file of the keys, for messages.
    """

    size: int
    dim: int = 0
    args: Sequence[int] = (0,)
    kwargs: Sequence[str] = ()
    where: str = "fsdp2.yaml"


def apply_chunks(modules: Mapping[str, nn.Module], plan: ChunkPlan) -> None:
    """Let each of `modules` run on chunks of a micro-batch in training; `forward` is replaced.

    Args:
        modules: path → recomputed module.
    """
    for path, module in modules.items():
        module.forward = _chunked(module, module.forward, path, plan)  # type: ignore[method-assign]


def _chunked(module: nn.Module, forward: Callable[..., Any], path: str, plan: ChunkPlan) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or not module.training:
            return forward(*args, **kwargs)
        first = _first_tensor(path, args, kwargs, plan)
        rows = first.shape[plan.dim]
        if rows <= plan.size:
            return forward(*args, **kwargs)
        _refuse_shared_lengths(path, kwargs, plan)
        outputs = []
        for start in range(0, rows, plan.size):
            length = min(plan.size, rows - start)
            cut = functools.partial(tree_map, functools.partial(_cut, first, start, length, plan, path))
            own_args = [cut(arg) if i in plan.args else arg for i, arg in enumerate(args)]
            own_kwargs = {
                name: arg.of_rows(start, length)
                if isinstance(arg, RowWise)
                else cut(arg)
                if name in plan.kwargs
                else arg
                for name, arg in kwargs.items()
            }
            outputs.append((length, forward(*own_args, **own_kwargs)))
        return _joined(path, outputs, plan)

    return run


def _first_tensor(path: str, args: Sequence[Any], kwargs: Mapping[str, Any], plan: ChunkPlan) -> torch.Tensor:
    """Return the first tensor that is split: the hidden states [rows, ...].

    Raises:
        ConfigError: there is none, or there is nothing to split.
    """
    split = [args[i] for i in plan.args if i < len(args)] + [kwargs[name] for name in plan.kwargs if name in kwargs]
    first = next((leaf for leaf in tree_flatten(split)[0] if isinstance(leaf, torch.Tensor)), None)
    if first is None or first.dim() <= plan.dim:
        raise ConfigError(
            f"{plan.where}: '{path}' is called with {len(args)} positional arguments and the keyword arguments "
            f"{', '.join(kwargs) or '(none)'}, none of which is a tensor with dimension {plan.dim} that chunk_mbs_args "
            f"{list(plan.args)} or chunk_mbs_kwargs {list(plan.kwargs)} names"
        )
    if first.shape[plan.dim] == 1:
        raise ConfigError(
            f"{plan.where}: chunk_mbs_modules splits the rows of a micro-batch, but '{path}' is given one row only "
            "(packed rows are one row, too); raise --micro-batch-size, or remove chunk_mbs_modules"
        )
    return first


def _refuse_shared_lengths(path: str, kwargs: Mapping[str, Any], plan: ChunkPlan) -> None:
    """
    Raises:
        ConfigError: an argument concerns all rows of the micro-batch, and isn't split.
    """
    for name, value in kwargs.items():
        if name.startswith("cu_seq") and isinstance(value, torch.Tensor):
            raise ConfigError(
                f"{plan.where}: '{path}' is given '{name}', the boundaries of samples in all rows together, so that "
                "rows can't run one after the other; remove chunk_mbs_modules, or packing from data.json"
            )


def _cut(first: torch.Tensor, start: int, length: int, plan: ChunkPlan, path: str, leaf: Any) -> Any:
    """Return the rows of a chunk of a tensor; one that has a single row for all of them, and no tensor, as it is.

    Raises:
        ConfigError: the tensor has another number of rows, or, as the tables of positions in time, height and width,
            another dimension before that of the rows.
    """
    rows, dim = first.shape[plan.dim], plan.dim
    if not isinstance(leaf, torch.Tensor) or leaf.dim() <= plan.dim or leaf.shape[plan.dim] == 1:
        return leaf
    has_another = leaf.dim() > first.dim() and leaf.shape[dim + 1 : dim + 3] == first.shape[dim : dim + 2]
    if leaf.shape[plan.dim] != rows or has_another:
        raise ConfigError(
            f"{plan.where}: an argument of '{path}' that chunk_mbs_args or chunk_mbs_kwargs names has shape "
            f"{list(leaf.shape)}; expected {rows} rows, or one for all of them, in dimension {plan.dim}"
        )
    return leaf.narrow(plan.dim, start, length)


def _joined(path: str, outputs: Sequence[tuple[int, Any]], plan: ChunkPlan) -> Any:
    """Return the outputs of all chunks as one, joined tensor by tensor.

    Raises:
        ConfigError: an output hasn't the rows of its chunk.
    """
    leaves = []
    for length, output in outputs:
        flat, spec = tree_flatten(output)
        for leaf in flat:
            if isinstance(leaf, torch.Tensor) and (leaf.dim() <= plan.dim or leaf.shape[plan.dim] != length):
                raise ConfigError(
                    f"{plan.where}: '{path}' returns a tensor of shape {list(leaf.shape)} for a chunk of {length} rows "
                    f"in dimension {plan.dim}; name every argument with rows in chunk_mbs_args or chunk_mbs_kwargs"
                )
        leaves.append(flat)
    joined = [torch.cat(parts, plan.dim) if isinstance(parts[0], torch.Tensor) else parts[0] for parts in zip(*leaves)]
    return tree_unflatten(joined, spec)
