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

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_mm import accelerator
from mindspeed_mm.accelerator.attention import AttentionKernel, PlainAttention
from mindspeed_mm.accelerator.attention.sinks import divide_by_sinks, gradient_of_sinks
from mindspeed_mm.parallel.ring_layout import Part, RingLayout, TokenSelection
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
    layout = RingLayout(tuple(tuple(map(int, row)) for row in chunks), ring.rank, ring.size, window)
    _check(query, key, value, layout)
    return _RingAttention.apply(query, key, value, sinks, layout, ring, scale)


def _check(query: Tensor, key: Tensor, value: Tensor, layout: RingLayout) -> None:
    if query.shape[1] % key.shape[1] or key.shape[:3] != value.shape[:3] or query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"ring attention: query {list(query.shape)}, key {list(key.shape)} and value {list(value.shape)} don't fit"
        )
    if len(layout.chunks) != query.shape[0]:
        raise ValueError(
            f"ring attention: chunks of {len(layout.chunks)} rows are given for a batch of {query.shape[0]}"
        )
    longest = max(2 * sum(row) for row in layout.chunks)
    if longest > query.shape[2] or query.shape[2] != key.shape[2]:
        raise ValueError(
            f"ring attention: the documents of a row have {longest} tokens on this rank; there are {query.shape[2]} "
            f"queries and {key.shape[2]} keys"
        )
    if layout.window is not None and layout.window < 1:
        raise ValueError(f"ring attention: window is {layout.window}, expected at least 1")


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
        layout: RingLayout,
        ring: RankSet,
        scale: float,
    ) -> Tensor:
        query, key, value = query.transpose(1, 2), key.transpose(1, 2).contiguous(), value.transpose(1, 2).contiguous()
        blocks = _Blocks(layout, query, value, scale)
        merged = _Merged((*query.shape[:3], value.shape[-1]), query.device)
        held = [key, value]
        for step in range(ring.size):
            coming = _Shift(held, ring) if step < ring.size - 1 else None
            blocks.forward((ring.rank - step) % ring.size, held, merged)
            if coming is not None:
                held = coming.wait()
        out, lse = merged.total()
        if sinks is not None:
            out, lse = divide_by_sinks(out, lse, sinks)
        out = out.to(query.dtype)
        ctx.save_for_backward(blocks.query, key, value, sinks, out, lse)
        ctx.layout, ctx.ring, ctx.scale = layout, ring, scale
        return out.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        ring = ctx.ring
        blocks = _Blocks(ctx.layout, query, value, ctx.scale)
        grad_out = grad_out.transpose(1, 2).contiguous()
        grad_query = _Sum(query)
        held, travelling = [key, value], None
        for step in range(ring.size):
            coming = _Shift(held, ring) if step < ring.size - 1 else None
            grads = blocks.backward((ring.rank - step) % ring.size, held, grad_out, out, lse, grad_query)
            if travelling is not None:  # the sums of the ranks that held these keys before have come meanwhile
                grads = [sums.add_(own) for sums, own in zip(travelling.wait(), grads)]
            if coming is not None:
                held = coming.wait()
            travelling = _Shift(grads, ring) if ring.size > 1 else None
        grad_key, grad_value = grads if travelling is None else travelling.wait()
        grad_sinks = None if sinks is None else gradient_of_sinks(grad_out, out, lse, sinks)
        heads_first = (
            grad.to(of.dtype).transpose(1, 2)
            for grad, of in ((grad_query.total(), query), (grad_key, key), (grad_value, value))
        )
        return *heads_first, grad_sinks, None, None, None


class _Merged:
    """Output and log-sum-exp of the blocks that were merged so far, in fp32.

    Args:
        shape: shape of the output.
    """

    def __init__(self, shape: Sequence[int], device: torch.device) -> None:
        self._shape, self._device = shape, device
        self._state: tuple[Tensor, Tensor] | None = None

    def merge(self, where: TokenSelection, out: Tensor, lse: Tensor) -> None:
        """Merge the attention of some queries to further keys; all of them at first are taken as they are."""
        if self._state is None and where.are_all_of(self._shape) and _can_be_kept(out):
            self._state = (out, lse.contiguous())
            return
        merged, before = (where.take(tensor) for tensor in self.total())
        total = torch.logaddexp(before, lse)
        merged.mul_((before - total).exp_().unsqueeze(-1)).addcmul_(out, (lse - total).exp_().unsqueeze(-1))
        for tensor, part in zip(self.total(), (merged, before.copy_(total))):
            where.put(tensor, part)

    def total(self) -> tuple[Tensor, Tensor]:
        """Return the output and the log-sum-exp; those of queries that saw nothing are 0 and as good as -inf."""
        if self._state is None:
            out = torch.zeros(*self._shape, dtype=torch.float32, device=self._device)
            self._state = (out, torch.full(out.shape[:3], _LEAST, dtype=torch.float32, device=self._device))
        return self._state


class _Sum:
    """A sum of parts of a tensor, in fp32.

    Args:
        like: a tensor of its shape.
    """

    def __init__(self, like: Tensor) -> None:
        self._shape, self._device = like.shape, like.device
        self._total: Tensor | None = None

    def add(self, where: TokenSelection, part: Tensor) -> None:
        """Add to some tokens; a part for all of them at first is taken as it is."""
        if self._total is None and where.are_all_of(self._shape) and _can_be_kept(part):
            self._total = part
        else:
            where.add(self.total(), part)

    def total(self) -> Tensor:
        if self._total is None:
            self._total = torch.zeros(self._shape, dtype=torch.float32, device=self._device)
        return self._total


def _can_be_kept(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.is_contiguous()


class _Blocks:
    """This rank's queries against the blocks of keys that come by.

    Attributes:
        query: the queries; contiguous if the kernel wants documents packed.
    """

    def __init__(self, layout: RingLayout, query: Tensor, value: Tensor, scale: float) -> None:
        self._layout, self._scale = layout, scale
        self._kernel = accelerator.current().attention_kernel(query, value)
        self.query = query.contiguous() if self._kernel.takes_packed else query

    def _parts(self, source: int) -> list[tuple[Part, AttentionKernel]]:
        parts = self._layout.parts(source, self._kernel, self.query.shape[1], self.query.device)
        return [(part, self._kernel if self._kernel.takes(part.band) else PlainAttention()) for part in parts]

    def forward(self, source: int, held: list[Tensor], merged: _Merged) -> None:
        """Merge the attention to the keys and values of rank `source`."""
        for part, kernel in self._parts(source):
            key, value = (part.keys.take(tensor) for tensor in held)
            how: Any = {"band": part.band, "scale": self._scale, "lengths": part.lengths}
            merged.merge(part.queries, *kernel.forward(part.queries.take(self.query), key, value, **how))

    def backward(
        self, source: int, held: list[Tensor], grad_out: Tensor, out: Tensor, lse: Tensor, grad_query: _Sum
    ) -> list[Tensor]:
        """Add to the gradient of the queries, and return those of the keys and values of rank `source`, in fp32."""
        sums = [_Sum(tensor) for tensor in held]
        for part, kernel in self._parts(source):
            grad, query, final, its_lse = (part.queries.take(t) for t in (grad_out, self.query, out, lse))
            key, value = (part.keys.take(tensor) for tensor in held)
            how: Any = {"band": part.band, "scale": self._scale, "lengths": part.lengths}
            of_query, *of_held = kernel.backward(grad, query, key, value, final, its_lse, **how)
            grad_query.add(part.queries, of_query)
            for total, own in zip(sums, of_held):
                total.add(part.keys, own)
        return [each.total() for each in sums]
