"""Attention by matrix products in fp32, a few queries at a time: the kernel of every device and every band."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mindspeed_mm.accelerator.attention.kernel import AttentionKernel, Band, PackedLengths

_QUERIES = 256
"""Queries that are scored at a time. Under a window the scores are [queries, queries + window]."""


class PlainAttention(AttentionKernel):
    """See the module. Queries that see no key of the block have output 0 and log-sum-exp -inf."""

    name = "matrix products in fp32"

    def takes(self, band: Band | None) -> bool:
        return True

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        band: Band | None,
        scale: float,
        lengths: PackedLengths | None = None,
    ) -> tuple[Tensor, Tensor]:
        out = query.new_zeros(*query.shape[:3], value.shape[-1], dtype=torch.float32)
        lse = query.new_full(query.shape[:3], -torch.inf, dtype=torch.float32)
        for queries, keys in _tiles(query.shape[1], key.shape[1], band):
            scores = _scores(query, key, queries, keys, band, scale)
            tile_lse = scores.logsumexp(-1, keepdim=True)
            scores.sub_(tile_lse.clamp_min(torch.finfo(torch.float32).min)).exp_()
            tile = scores.flatten(2, 3) @ value[:, keys].transpose(1, 2).float()
            out[:, queries] = _ungroup(tile.unflatten(2, scores.shape[2:4]))
            lse[:, queries] = _ungroup(tile_lse).squeeze(-1)
        return out, lse

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        band: Band | None,
        scale: float,
        lengths: PackedLengths | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        grads = tuple(torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in (query, key, value))
        grad_query, grad_key, grad_value = grads
        groups = query.shape[2] // key.shape[2]
        for queries, keys in _tiles(query.shape[1], key.shape[1], band):
            of_out = _group(grad_out[:, queries], groups).float()
            delta = (of_out * _group(out[:, queries], groups)).sum(-1, keepdim=True)
            weights = _scores(query, key, queries, keys, band, scale)
            weights = weights.sub_(_group(lse[:, queries].unsqueeze(-1), groups)).exp_().flatten(2, 3)
            of_out = of_out.flatten(2, 3)
            grad_value[:, keys] += (weights.mT @ of_out).transpose(1, 2)
            of_scores = of_out @ value[:, keys].permute(0, 2, 3, 1).float()
            of_scores = of_scores.sub_(delta.flatten(2, 3)).mul_(weights).mul_(scale)
            grad_key[:, keys] += (of_scores.mT @ _group(query[:, queries], groups).float().flatten(2, 3)).transpose(
                1, 2
            )
            tile = of_scores @ key[:, keys].transpose(1, 2).float()
            grad_query[:, queries] = _ungroup(tile.unflatten(2, (groups, -1)))
        return grad_query, grad_key, grad_value


def _tiles(queries: int, keys: int, band: Band | None) -> Iterator[tuple[slice, slice]]:
    """Yield runs of queries with the run of keys that any of them sees; runs that see nothing are left out."""
    for start in range(0, queries, _QUERIES):
        stop = min(start + _QUERIES, queries)
        first, last = 0, keys
        if band is not None:
            last = min(keys, band.offset + stop)
            if band.window is not None:
                first = max(0, band.offset + start - band.window + 1)
        if first < last:
            yield slice(start, stop), slice(first, last)


def _scores(query: Tensor, key: Tensor, queries: slice, keys: slice, band: Band | None, scale: float) -> Tensor:
    """Return the scaled scores [batch, key heads, query heads of each, queries, keys] in fp32; -inf is unseen."""
    grouped = _group(query[:, queries], query.shape[2] // key.shape[2]).float()
    scores = (grouped.flatten(2, 3) @ key[:, keys].permute(0, 2, 3, 1).float()).mul_(scale)
    scores = scores.unflatten(2, grouped.shape[2:4])
    if band is None:
        return scores
    x = torch.arange(queries.start, queries.stop, device=query.device)
    y = torch.arange(keys.start, keys.stop, device=query.device)
    distance = band.offset + x[:, None] - y[None, :]
    unseen = distance < 0 if band.window is None else (distance < 0) | (distance >= band.window)
    return scores.masked_fill_(unseen, -torch.inf)


def _group(tensor: Tensor, groups: int) -> Tensor:
    """[batch, tokens, heads, size] → [batch, key heads, groups, tokens, size]."""
    return tensor.unflatten(2, (-1, groups)).permute(0, 2, 3, 1, 4)


def _ungroup(tensor: Tensor) -> Tensor:
    """The inverse of `_group`."""
    return tensor.permute(0, 3, 1, 2, 4).flatten(2, 3)
