"""What every kernel of block attention is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F


class Band(NamedTuple):
    """The keys that queries see: query x sees key y if 0 <= offset + x - y < window.

    Attributes:
        offset: position of the first query minus the position of the first key.
        window: size of the sliding window; None: no window.
    """

    offset: int = 0
    window: int | None = None


CAUSAL = Band()
"""Query x sees the keys 0 … x."""


@dataclass(frozen=True)
class PackedLengths:
    """Lengths of sequences that are packed one after the other.

    Attributes:
        queries, keys: number of queries and of keys of each sequence; none is zero.
        are_padding: which sequences nobody looks at; a kernel need not compute them: their output may be anything
            finite, and their gradients zeros. Empty: none is known to be one.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    are_padding: tuple[bool, ...] = ()

    @classmethod
    def of_rows(cls, query: Tensor, key: Tensor) -> PackedLengths:
        """Return the lengths of the rows of `[batch, tokens, …]`, packed one after the other."""
        return cls((query.shape[1],) * query.shape[0], (key.shape[1],) * key.shape[0])

    @property
    def query_ends(self) -> tuple[int, ...]:
        """Where the queries of each sequence end."""
        return tuple(accumulate(self.queries))

    @property
    def key_ends(self) -> tuple[int, ...]:
        """Where the keys of each sequence end."""
        return tuple(accumulate(self.keys))


class AttentionKernel(ABC):
    """Softmax attention of queries to one block of keys, and its gradients under the softmax over all blocks.

    Tensors are `[batch, tokens, heads, head size]`; query heads are a multiple of the key-value heads. The log-sum-exp
    is `[batch, query tokens, query heads]`, fp32.
    """

    name: str
    """What a table of kernels calls it."""
    takes_packed: bool = False
    """Whether `lengths` can be given: queries and keys of several sequences, packed, with batch size 1."""

    def takes(self, band: Band | None) -> bool:
        """Whether this kernel computes a band; every kernel computes None (all keys are seen) and CAUSAL."""
        return band is None or band == CAUSAL

    @abstractmethod
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
        """Return the output, normalised over this block alone, and the log-sum-exp of the scaled scores.

        Args:
            band: the keys that each query sees; in each sequence, if packed. None: all of them.
            scale: factor of the scores.
            lengths: sequences that are packed; None: one in each row.
        """

    @abstractmethod
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
        """Return this block's part of the gradients of query, key and value.

        Args:
            out, lse: final output and log-sum-exp, over all blocks (and a sink, if there is one).

        Source: Dao et al., FlashAttention, algorithm 4: P = exp(scores - lse), dV = P^T dO,
            dS = P * (dO V^T - rowsum(dO * O)), dQ = scale * dS K, dK = scale * dS^T Q.
        """


class PaddedHeads(AttentionKernel):
    """Gives a kernel that needs one head size, a multiple of some number, heads that are padded with zeros.

    Zeros at the end of queries and keys leave the scores as they are; those of values are cut off the output.

    Args:
        kernel: the kernel.
        multiple: what the head size must be a multiple of.
    """

    def __init__(self, kernel: AttentionKernel, multiple: int = 1) -> None:
        self._kernel, self._multiple = kernel, multiple
        self.takes_packed, self.name = kernel.takes_packed, kernel.name

    def takes(self, band: Band | None) -> bool:
        return self._kernel.takes(band)

    def _size(self, query: Tensor, value: Tensor) -> int:
        return -(-max(query.shape[-1], value.shape[-1]) // self._multiple) * self._multiple

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
        size = self._size(query, value)
        if size == query.shape[-1] == value.shape[-1]:
            return self._kernel.forward(query, key, value, band=band, scale=scale, lengths=lengths)
        q, k, v = (_pad(t, size) for t in (query, key, value))
        out, lse = self._kernel.forward(q, k, v, band=band, scale=scale, lengths=lengths)
        return out[..., : value.shape[-1]], lse

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
        size = self._size(query, value)
        if size == query.shape[-1] == value.shape[-1]:
            return self._kernel.backward(grad_out, query, key, value, out, lse, band=band, scale=scale, lengths=lengths)
        g, q, k, v, o = (_pad(t, size) for t in (grad_out, query, key, value, out))
        grads = self._kernel.backward(g, q, k, v, o, lse, band=band, scale=scale, lengths=lengths)
        grad_query, grad_key, grad_value = (grad[..., : of.shape[-1]] for grad, of in zip(grads, (query, key, value)))
        return grad_query, grad_key, grad_value


def _pad(tensor: Tensor, size: int) -> Tensor:
    return F.pad(tensor, (0, size - tensor.shape[-1]))
