"""Collectives on activations, as autograd functions: the backward pass of each is the collective that transposes it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from mindspeed_mm.parallel.world import RankSet


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
        summed = tensor.clone()
        dist.all_reduce(summed, group=ranks.group)
        return summed

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        """The gradient, unchanged."""
        return grad, None


def _all_to_all(tensors: tuple[torch.Tensor, ...], ranks: RankSet, split: int, join: int) -> tuple[torch.Tensor, ...]:
    parts = [torch.stack(tensor.chunk(ranks.size, split)) for tensor in tensors]  # each [ranks, *shape of a part]
    sent = torch.cat([part.flatten(1) for part in parts], dim=1) if len(parts) > 1 else parts[0].contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=ranks.group)
    flat = received.flatten(1).split([part[0].numel() for part in parts], dim=1)
    return tuple(torch.cat(own.view(part.shape).unbind(0), dim=join) for own, part in zip(flat, parts, strict=True))
