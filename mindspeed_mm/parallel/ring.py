"""Ring attention: causal attention over rows whose tokens are split over a ring of ranks.

Each rank keeps its queries. Keys and values travel around the ring, each rank computes its queries' attention to the
block that it holds, and outputs of blocks are merged by their log-sum-exp. In the backward pass keys and values travel
again, and their gradients travel with them, and home.

Layout: a row is documents one after the other, and each document is split over the ring by itself, so that all ranks
have the same work whatever the documents' lengths: of `2 * ring` equal chunks, rank i holds the chunks i and
`2 * ring - 1 - i`, in this order ("zigzag"). A document that doesn't fill its chunks is padded at its end, where
causality hides the padding from it. A block (queries of rank i, keys of rank j) then needs no mask:

- i == j: causal within the document's tokens;
- j < i: every query sees the document's first chunk of keys, and none of its second;
- j > i: the queries of the second chunk see all keys, those of the first see none.

Under a sliding window chunks are looked at in pairs: those that see each other wholly or not at all need no mask
either, others are computed a few queries at a time.

Sources: Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context" (arXiv 2310.01889); the
gradients of a block: Dao et al., "FlashAttention" (arXiv 2205.14135), algorithm 4.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_mm import accelerator
from mindspeed_mm.accelerator.attention import CAUSAL, AttentionKernel, Band, PlainAttention
from mindspeed_mm.parallel.world import RankSet

_LEAST = -1e30
"""Log-sum-exp of no keys: finite, so that merging never subtracts infinities."""


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    chunks: Sequence[Sequence[int]],
    ring: RankSet,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return causal attention of this rank's queries to the keys of all ranks of the ring, within documents.

    Differentiable in query, key, value and sinks; a collective of the ring, in both directions. Only the inputs, the
    output and its log-sum-exp are kept for the backward pass.

    Args:
        query: `[batch, query heads, tokens, head size]`, this rank's tokens in the layout of the module.
        key: `[batch, key heads, tokens, head size]`; key heads divide query heads.
        value: `[batch, key heads, tokens, value head size]`.
        chunks: for each row the tokens in one chunk of each of its documents, the same on all ranks. A document has
            `2 * chunk` tokens on this rank. Tokens after the last document are padding: their output is zero.
        ring: the ranks that the rows are split over.
        scale: factor of the scores.
        window: a query sees this many tokens, itself among them; None: all tokens before it.
        sinks: for each query head a score without a value, by which its softmax is divided too.

    Returns:
        `[batch, query heads, tokens, value head size]`, of the query's dtype.
    """
    layout = tuple(tuple(int(chunk) for chunk in row) for row in chunks)
    _check(query, key, value, layout, window)
    rows = _Rows(layout, ring.rank, ring.size, window)
    return _RingAttention.apply(query, key, value, sinks, rows, ring, scale)


def _check(query: Tensor, key: Tensor, value: Tensor, layout: tuple[tuple[int, ...], ...], window: int | None) -> None:
    if query.shape[1] % key.shape[1] or key.shape[:3] != value.shape[:3] or query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"ring attention: query {list(query.shape)}, key {list(key.shape)} and value {list(value.shape)} don't fit"
        )
    if len(layout) != query.shape[0]:
        raise ValueError(f"ring attention: chunks of {len(layout)} rows are given for a batch of {query.shape[0]}")
    longest = max(2 * sum(row) for row in layout)
    if longest > query.shape[2] or query.shape[2] != key.shape[2]:
        raise ValueError(
            f"ring attention: the documents of a row have {longest} tokens on this rank; there are {query.shape[2]} "
            f"queries and {key.shape[2]} keys"
        )
    if window is not None and window < 1:
        raise ValueError(f"ring attention: window is {window}, expected at least 1")


# --- which queries see which keys


@dataclass(frozen=True)
class _Part:
    """Queries and keys that are computed at once.

    Attributes:
        rows, queries, keys: ranges of rows, of query tokens and of key tokens.
        band: the keys that each query sees; None: all of them.
    """

    rows: slice
    queries: slice
    keys: slice
    band: Band | None


@dataclass(frozen=True)
class _Rows:
    """The layout of a batch, as one rank sees it.

    Attributes:
        chunks: for each row the length of a chunk of each document.
        rank, ranks: rank in the ring and size of the ring.
        window: size of the sliding window, if there is one.
    """

    chunks: tuple[tuple[int, ...], ...]
    rank: int
    ranks: int
    window: int | None

    @functools.lru_cache(maxsize=256)  # noqa: B019 (a value, not an object with a life of its own)
    def parts(self, source: int) -> tuple[_Part, ...]:
        """Return what is to be computed with the keys of rank `source`."""
        if len(set(self.chunks)) == 1:
            return tuple(self._parts_of_rows(slice(0, len(self.chunks)), self.chunks[0], source))
        return tuple(
            part
            for row, chunks in enumerate(self.chunks)
            for part in self._parts_of_rows(slice(row, row + 1), chunks, source)
        )

    def _parts_of_rows(self, rows: slice, chunks: tuple[int, ...], source: int) -> Iterator[_Part]:
        start = 0
        for chunk in chunks:
            first, second, both = (
                slice(start, start + chunk),
                slice(start + chunk, start + 2 * chunk),
                slice(start, start + 2 * chunk),
            )
            start += 2 * chunk
            if not chunk:
                continue
            if self.window is not None and self.window < 2 * self.ranks * chunk:
                yield from self._parts_under_window(rows, (first, second), chunk, source)
            elif source == self.rank:
                yield _Part(rows, both, both, CAUSAL)
            elif source < self.rank:
                yield _Part(rows, both, first, None)
            else:
                yield _Part(rows, second, both, None)

    def _parts_under_window(self, rows: slice, halves: tuple[slice, slice], chunk: int, source: int) -> Iterator[_Part]:
        assert self.window is not None
        for queries, of_queries in zip(halves, self._chunks_of(self.rank)):
            for keys, of_keys in zip(halves, self._chunks_of(source)):
                offset = (of_queries - of_keys) * chunk
                if offset < 0 or offset - (chunk - 1) >= self.window:
                    continue
                if offset and offset + chunk - 1 < self.window:
                    yield _Part(rows, queries, keys, None)
                else:
                    yield _Part(
                        rows, queries, keys, Band(offset, None if chunk <= self.window and not offset else self.window)
                    )

    def _chunks_of(self, rank: int) -> tuple[int, int]:
        return rank, 2 * self.ranks - 1 - rank


# --- what travels


class _Shift:
    """Tensors on their way to the next rank of the ring, while others come from the rank before."""

    def __init__(self, tensors: Sequence[Tensor], ring: RankSet) -> None:
        """
        Args:
            tensors: contiguous tensors; they are kept until `wait`, as is needed while they are being sent.
        """
        self._sent = list(tensors)
        self._received = [torch.empty_like(tensor) for tensor in tensors]
        after, before = (ring.rank + 1) % ring.size, (ring.rank - 1) % ring.size
        operations = []
        for sent, received in zip(self._sent, self._received):
            operations.append(dist.P2POp(dist.isend, sent, group=ring.group, group_peer=after))
            operations.append(dist.P2POp(dist.irecv, received, group=ring.group, group_peer=before))
        self._work = dist.batch_isend_irecv(operations)

    def wait(self) -> list[Tensor]:
        """Return what has come."""
        for work in self._work:
            work.wait()
        self._sent.clear()
        return self._received


class _RingAttention(torch.autograd.Function):
    """See `ring_attention`. Inside, tensors are `[batch, tokens, heads, head size]`."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        rows: _Rows,
        ring: RankSet,
        scale: float,
    ) -> Tensor:
        query, key, value = query.transpose(1, 2), key.transpose(1, 2).contiguous(), value.transpose(1, 2).contiguous()
        kernel = _Kernels(query, value, scale)
        out = torch.zeros(*query.shape[:3], value.shape[-1], dtype=torch.float32, device=query.device)
        lse = torch.full(query.shape[:3], _LEAST, dtype=torch.float32, device=query.device)
        held = [key, value]
        for step in range(ring.size):
            coming = _Shift(held, ring) if step < ring.size - 1 else None
            for part in rows.parts((ring.rank - step) % ring.size):
                kernel.forward(part, query, held[0], held[1], out, lse)
            if coming is not None:
                held = coming.wait()
        if sinks is not None:
            total = torch.logaddexp(lse, sinks.float())
            out.mul_((lse - total).exp_().unsqueeze(-1))
            lse = total
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.rows, ctx.ring, ctx.scale = rows, ring, scale
        return out.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        rows, ring = ctx.rows, ctx.ring
        kernel = _Kernels(query, value, ctx.scale)
        grad_out = grad_out.transpose(1, 2).contiguous()
        grad_query = torch.zeros_like(query, dtype=torch.float32)
        held, gradients = [key, value], None
        for step in range(ring.size):
            coming = _Shift(held, ring) if step < ring.size - 1 else None
            block = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in held]
            for part in rows.parts((ring.rank - step) % ring.size):
                kernel.backward(part, grad_out, query, held[0], held[1], out, lse, grad_query, block[0], block[1])
            if gradients is not None:  # the sums of the ranks that held these keys before have come meanwhile
                block = [sums.add_(own) for sums, own in zip(gradients.wait(), block)]
            if coming is not None:
                held = coming.wait()
            gradients = _Shift(block, ring) if ring.size > 1 else None
        grad_key, grad_value = block if gradients is None else gradients.wait()
        grad_sinks = None
        if sinks is not None:
            delta = (grad_out.float() * out).sum(-1)
            grad_sinks = -((sinks.float() - lse).exp_() * delta).sum((0, 1)).to(sinks.dtype)
        heads_first = (
            gradient.to(of.dtype).transpose(1, 2)
            for gradient, of in ((grad_query, query), (grad_key, key), (grad_value, value))
        )
        return *heads_first, grad_sinks, None, None, None


class _Kernels:
    """The device's kernel, and plain attention for what it doesn't compute, on parts of a block."""

    def __init__(self, query: Tensor, value: Tensor, scale: float) -> None:
        self._own = accelerator.current().attention_kernel(query, value)
        self._scale = scale

    def _for(self, part: _Part) -> AttentionKernel:
        return self._own if self._own.takes(part.band) else PlainAttention()

    def forward(self, part: _Part, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor) -> None:
        """Merge a part into the output and the log-sum-exp."""
        q = (part.rows, part.queries)
        k = (part.rows, part.keys)
        part_out, part_lse = self._for(part).forward(query[q], key[k], value[k], band=part.band, scale=self._scale)
        total = torch.logaddexp(lse[q], part_lse)
        out[q].mul_((lse[q] - total).exp_().unsqueeze(-1)).addcmul_(part_out, (part_lse - total).exp_().unsqueeze(-1))
        lse[q] = total

    def backward(
        self,
        part: _Part,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        grad_query: Tensor,
        grad_key: Tensor,
        grad_value: Tensor,
    ) -> None:
        """Add a part's gradients."""
        q = (part.rows, part.queries)
        k = (part.rows, part.keys)
        of_query, of_key, of_value = self._for(part).backward(
            grad_out[q], query[q], key[k], value[k], out[q], lse[q], band=part.band, scale=self._scale
        )
        grad_query[q].add_(of_query)
        grad_key[k].add_(of_key)
        grad_value[k].add_(of_value)
