"""Collectives on activations, as autograd functions: the backward pass of each is the collective that transposes it.

Gradients are plain sums: no function divides. Sources: Megatron-LM (Shoeybi et al., arXiv 1909.08053), functions f and
g; along the sequence, Reducing Activation Recomputation in Large Transformer Models (Korthikanti et al., arXiv
2205.05198), functions g and its conjugate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from mindspeed_mm.parallel.world import RankSet

# torch 2.14 renames them; the older names warn there
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def heads_to_sequence(ranks: RankSet, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Exchange a part of the sequence with all heads for the whole sequence with a part of the heads.

    One all-to-all for all tensors. Source: DeepSpeed-Ulysses (Jacobs et al., arXiv 2309.14509).

    Args:
        ranks: n ranks, each with a contiguous part of the sequence, ordered by rank.
        tensors: [batch, heads, sequence / n, head size], of one dtype; n divides heads.

    Returns:
        of each tensor [batch, heads / n, sequence, head size].
    """
    return tensors if ranks.size == 1 else _AllToAll.apply(ranks, 1, 2, *tensors)


def sequence_to_heads(ranks: RankSet, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Exchange the whole sequence with a part of the heads for a part of the sequence; `heads_to_sequence` reversed.

    Args:
        tensors: [batch, heads / n, sequence, head size]; n divides sequence.

    Returns:
        of each tensor [batch, heads, sequence / n, head size].
    """
    return tensors if ranks.size == 1 else _AllToAll.apply(ranks, 2, 1, *tensors)


def total(tensor: torch.Tensor, ranks: RankSet) -> torch.Tensor:
    """Return the sum of all ranks' tensors; the gradient of a rank's tensor is that of the sum on the same rank."""
    return tensor if ranks.size == 1 else _Total.apply(tensor, ranks)


def copy(x: torch.Tensor, ranks: RankSet) -> torch.Tensor:
    """Return `x`, which all ranks have, for a computation of which each rank does a part.

    Forward: nothing. Backward: the sum of the gradients over the ranks.
    """
    return _Copy.apply(x, ranks)


@torch.compiler.disable  # parts may differ in length from rank to rank
def gather(x: torch.Tensor, ranks: RankSet, dim: int, *, is_partial: bool) -> torch.Tensor:
    """Return the parts of all ranks, joined in `dim` in the order of the ranks.

    Forward: all-gather. Backward: this rank's part of the gradient.

    Args:
        x: this rank's part; the same shape on all ranks.
        is_partial: whether each rank computes only a part of the gradient of the whole, so that the parts are summed
            over the ranks (reduce-scatter). False: every rank computes the whole gradient.
    """
    return _Gather.apply(x, ranks, dim, is_partial)


@torch.compiler.disable  # parts may differ in length from rank to rank
def reduce_scatter(x: torch.Tensor, ranks: RankSet, dim: int) -> torch.Tensor:
    """Return this rank's part, in `dim`, of the sum of `x` over the ranks.

    Forward: reduce-scatter. Backward: all-gather.

    Args:
        x: its size in `dim` is a multiple of the number of ranks.
    """
    return _ReduceScatter.apply(x, ranks, dim)


def cut(x: torch.Tensor, ranks: RankSet, dim: int) -> torch.Tensor:
    """Return this rank's part, in `dim`, of `x`, which all ranks have.

    Forward: nothing is sent. Backward: all-gather, so that every rank has the whole gradient.

    Args:
        x: its size in `dim` is a multiple of the number of ranks.
    """
    return _Cut.apply(x, ranks, dim)


def gather_rows(x: torch.Tensor, sizes: Sequence[int], ranks: RankSet) -> torch.Tensor:
    """Return the rows of all ranks, which have different numbers of them, one after the other.

    Forward: all-gather. Backward: the sum over the ranks of the gradients of this rank's rows.

    Args:
        x: [n, ...], of which the first `sizes[ranks.rank]` rows are taken; the gradient of the others is zero.
        sizes: number of rows of each rank.

    Returns:
        [sum of sizes, ...].
    """
    longest, own = max(sizes), sizes[ranks.rank]
    padded = F.pad(x[:own], (0, 0) * (x.dim() - 1) + (0, longest - own))
    parts = gather(padded, ranks, 0, is_partial=True).split(longest)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


class _AllToAll(torch.autograd.Function):
    """Split tensors along one dimension, send a part to each rank, and join what arrives along another one."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, ranks: RankSet, split: int, join: int, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Tensors → tensors with dimension `split` divided by the number of ranks, and `join` multiplied with it."""
        ctx.ranks, ctx.split, ctx.join = ranks, split, join
        return _all_to_all(tensors, ranks, split, join)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        """The same exchange in the opposite direction."""
        return None, None, None, *_all_to_all(grads, ctx.ranks, ctx.join, ctx.split)


class _Total(torch.autograd.Function):
    """All-reduce; identity in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, ranks: RankSet) -> torch.Tensor:  # type: ignore[override]
        """A tensor → the sum over ranks."""
        return _sum(tensor, ranks)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        """The gradient, unchanged."""
        return grad, None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: RankSet) -> torch.Tensor:  # type: ignore[override]
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return _sum(grad, ctx.ranks), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: torch.Tensor, ranks: RankSet, dim: int, is_partial: bool
    ) -> torch.Tensor:
        ctx.ranks, ctx.dim, ctx.is_partial = ranks, dim % x.dim(), is_partial
        return _join(x, ranks, ctx.dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        back = _sum_and_cut if ctx.is_partial and grad.numel() else _part
        return back(grad, ctx.ranks, ctx.dim), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: RankSet, dim: int) -> torch.Tensor:  # type: ignore[override]
        ctx.ranks, ctx.dim = ranks, dim % x.dim()
        return _sum_and_cut(x, ranks, ctx.dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return _join(grad, ctx.ranks, ctx.dim), None, None


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: RankSet, dim: int) -> torch.Tensor:  # type: ignore[override]
        ctx.ranks, ctx.dim = ranks, dim % x.dim()
        return _part(x, ranks, ctx.dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return _join(grad, ctx.ranks, ctx.dim), None, None


def _sum(x: torch.Tensor, ranks: RankSet) -> torch.Tensor:
    summed = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(summed, group=ranks.group)
    return summed


def _join(x: torch.Tensor, ranks: RankSet, dim: int) -> torch.Tensor:
    size = ranks.size
    if x.numel() == 0:
        return torch.cat([x] * size, dim)
    joined = x.new_empty(size * x.shape[0], *x.shape[1:])
    _all_gather(joined, x.contiguous(), group=ranks.group)
    return joined.unflatten(0, (size, -1)).movedim(0, dim).flatten(dim, dim + 1)


def _sum_and_cut(x: torch.Tensor, ranks: RankSet, dim: int) -> torch.Tensor:
    parts = x.unflatten(dim, (ranks.size, -1)).movedim(dim, 0).contiguous()
    part = parts.new_empty(parts.shape[1:])
    _reduce_scatter(part, parts.flatten(0, 1), group=ranks.group)
    return part


def _part(x: torch.Tensor, ranks: RankSet, dim: int) -> torch.Tensor:
    length = x.shape[dim] // ranks.size
    return x.narrow(dim, ranks.rank * length, length).contiguous()


def _all_to_all(tensors: tuple[torch.Tensor, ...], ranks: RankSet, split: int, join: int) -> tuple[torch.Tensor, ...]:
    parts = [torch.stack(tensor.chunk(ranks.size, split)) for tensor in tensors]  # each [ranks, *shape of a part]
    sent = torch.cat([part.flatten(1) for part in parts], dim=1) if len(parts) > 1 else parts[0].contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=ranks.group)
    flat = received.flatten(1).split([part[0].numel() for part in parts], dim=1)
    return tuple(torch.cat(own.view(part.shape).unbind(0), dim=join) for own, part in zip(flat, parts, strict=True))
