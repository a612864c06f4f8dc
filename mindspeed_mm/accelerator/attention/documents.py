"""Where the documents of a batch's rows are, and attention that sees nothing beyond a token's document.

No mask is made. A kernel that takes packed sequences computes all documents at once, with padding as one of them; for
others, neighbouring documents of one length are a batch, and padding is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mindspeed_mm.accelerator.attention.kernel import CAUSAL, AttentionKernel, Band, PackedLengths
from mindspeed_mm.accelerator.attention.plain import PlainAttention
from mindspeed_mm.accelerator.attention.sinks import divide_by_sinks, gradient_of_sinks


@dataclass(frozen=True)
class Documents:
    """Where documents are in the rows of a batch.

    Attributes:
        rows: of each row the runs of its tokens, in order: (tokens, whether they are a document; otherwise they are
            padding). All rows have the same number of tokens; a run has at least one.
    """

    rows: tuple[tuple[tuple[int, bool], ...], ...]

    @classmethod
    def of(cls, numbers: Tensor) -> Documents:
        """Find the documents of `numbers` [batch, sequence] int64: equal neighbours are a document, 0 is padding."""
        rows: list[list[tuple[int, bool]]] = [[] for _ in numbers]
        begins = torch.ones_like(numbers, dtype=torch.bool)
        torch.ne(numbers[:, 1:], numbers[:, :-1], out=begins[:, 1:])
        flat = begins.flatten().nonzero().squeeze(1)
        lengths = flat.diff(append=flat.new_tensor([numbers.numel()]))
        of_runs = flat // max(1, numbers.shape[1]), lengths, numbers.flatten()[flat] != 0
        for row, length, is_document in torch.stack(of_runs).T.tolist():
            rows[row].append((length, bool(is_document)))
        return cls(tuple(map(tuple, rows)))

    @classmethod
    def of_runs(cls, runs: Sequence[Sequence[int]]) -> Documents:
        """Documents of the runs of all rows, as `runs` has them."""
        rows: list[list[tuple[int, bool]]] = [[] for _ in range(runs[-1][0] + 1)]
        for row, length, is_document in runs:
            if length:
                rows[row].append((length, bool(is_document)))
        return cls(tuple(map(tuple, rows)))

    @classmethod
    def in_one_row(cls, lengths: Sequence[int]) -> Documents:
        """Documents of these lengths, one after the other in one row; a length of zero is no document."""
        return cls((tuple((length, True) for length in lengths if length),))

    def of_rows(self, start: int, count: int) -> Documents:
        """Return those of `count` rows from row `start` on."""
        return Documents(self.rows[start : start + count])

    @cached_property
    def shape(self) -> tuple[int, int]:
        """Numbers of rows, and of tokens in each."""
        return len(self.rows), sum(length for length, _ in self.rows[0])

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest document; 0 if there is none."""
        return max((length for length, is_document in chain(*self.rows) if is_document), default=0)

    @cached_property
    def packed(self) -> PackedLengths:
        """Lengths of all runs of all rows, one after the other; padding is a sequence of its own."""
        lengths = tuple(length for length, _ in chain(*self.rows))
        return PackedLengths(lengths, lengths, tuple(not is_document for _, is_document in chain(*self.rows)))

    @cached_property
    def runs(self) -> Tensor:
        """The runs of all rows [runs, 3] int64, on the host: row, tokens, whether they are a document.

        There are at least two, of which the last may have no tokens: a graph of a compiled model would take a size of
        one for a constant.
        """
        runs = [(number, *run) for number, row in enumerate(self.rows) for run in row]
        return torch.tensor([*runs, (len(self.rows) - 1, 0, False)], dtype=torch.int64)

    @cached_property
    def blocks(self) -> tuple[RowBlock, ...]:
        """The rows in order, in blocks of like ones: all of them, or each by itself."""
        count = len(self.rows)
        if len(set(self.rows)) == 1:
            return (RowBlock(slice(0, count), tuple(_runs(self.rows[0], merges=count == 1))),)
        return tuple(RowBlock(slice(i, i + 1), tuple(_runs(row, merges=True))) for i, row in enumerate(self.rows))


class DocumentRun(NamedTuple):
    """Neighbouring documents of one length, or padding.

    Attributes:
        length: tokens of a document.
        number: of documents.
        is_document: whether they are; otherwise they are padding.
    """

    length: int
    number: int
    is_document: bool

    def documents_in(self, part: Tensor) -> Tensor:
        """Return its part of rows, `[rows, tokens, …]`, as `[documents, length, …]`, a view."""
        return part if self.number == 1 else part[0].unflatten(0, (self.number, self.length))

    def in_rows(self, part: Tensor) -> Tensor:
        """Undo `documents_in`."""
        return part if self.number == 1 else part.flatten(0, 1).unsqueeze(0)


class RowBlock(NamedTuple):
    """Rows whose documents have the same places.

    Attributes:
        rows: which; one of them if there is a run of several documents.
        runs: of each row, from its begin to its end.
    """

    rows: slice
    runs: tuple[DocumentRun, ...]

    def cut(self, *tensors: Tensor) -> Iterator[tuple[DocumentRun, tuple[Tensor, ...]]]:
        """Yield each run with its parts of tensors `[batch, tokens, …]`, which are views."""
        sizes = [run.length * run.number for run in self.runs]
        parts = ((tensor[self.rows] if tensor.shape[0] > 1 else tensor).split(sizes, 1) for tensor in tensors)
        yield from zip(self.runs, zip(*parts, strict=True), strict=True)


def _runs(row: tuple[tuple[int, bool], ...], *, merges: bool) -> Iterator[DocumentRun]:
    """Yield the runs of a row; equal neighbours are one if `merges`."""
    if not merges:
        yield from (DocumentRun(length, 1, is_document) for length, is_document in row)
        return
    for (length, is_document), alike in groupby(row):
        yield DocumentRun(length, len(list(alike)), is_document)


def document_attention(
    kernel: AttentionKernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents,
    *,
    scale: float,
    is_causal: bool = True,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention of each token to those of its document.

    Differentiable in query, key, value and sinks. Where no kernel of its own suits the device, PyTorch's own attention
    computes causal and whole documents.

    Args:
        kernel: the device's, for these tensors.
        query: `[batch, query heads, tokens, head size]`.
        key: `[batch, key heads, tokens, head size]`; key heads divide query heads.
        value: `[batch, key heads, tokens, value head size]`.
        documents: of these rows.
        scale: factor of the scores.
        is_causal: a token sees itself and those before it only.
        window: if causal, a token sees this many tokens, itself among them; None: all before it.
        sinks: for each query head a score without a value, by which its softmax is divided too.

    Returns:
        `[batch, tokens, query heads, value head size]`; that of padding is finite, and otherwise undefined.

    Raises:
        ValueError: the documents are of rows of another shape.
    """
    shape = (query.shape[0], query.shape[2])
    if documents.shape != shape or key.shape[2] != shape[1]:
        raise ValueError(
            f"attention within documents: query {list(query.shape)} and key {list(key.shape)} for documents of "
            f"{documents.shape[0]} rows of {documents.shape[1]} tokens"
        )
    how = AttentionWithin.of(kernel, documents, scale=scale, is_causal=is_causal, window=window)
    if isinstance(kernel, PlainAttention) and how.window is None and sinks is None:
        return _by_pytorch(query, key, value, documents, scale, is_causal)
    return _DocumentAttention.apply(query, key, value, sinks, how)


def _by_pytorch(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, scale: float, is_causal: bool
) -> Tensor:
    """PyTorch's own choice among its kernels, document by document."""
    given: Any = {"scale": scale, "is_causal": is_causal, "enable_gqa": query.shape[1] != key.shape[1]}
    rows = []
    for number, row in enumerate(documents.rows):
        parts = [tensor[number].split([length for length, _ in row], dim=1) for tensor in (query, key, value)]
        outputs = [
            F.scaled_dot_product_attention(q[None], k[None], v[None], **given)[0]
            if is_document
            else q.new_zeros(*q.shape[:2], v.shape[-1])
            for q, k, v, (_, is_document) in zip(*parts, row, strict=True)
        ]
        rows.append(torch.cat(outputs, dim=1).transpose(0, 1))
    return torch.stack(rows)


@dataclass(frozen=True)
class AttentionWithin:
    """What is computed by which kernel, of tensors `[batch, tokens, heads, head size]`; see `document_attention`."""

    kernel: AttentionKernel
    documents: Documents
    is_causal: bool
    window: int | None
    scale: float

    @classmethod
    def of(
        cls, kernel: AttentionKernel, documents: Documents, *, scale: float, is_causal: bool, window: int | None
    ) -> AttentionWithin:
        """Attention within these documents; a window that none of them fills is none."""
        window = None if window is None or window >= documents.longest else window
        return cls(kernel, documents, is_causal, window, scale)

    def _band(self, length: int) -> Band | None:
        if not self.is_causal:
            return None
        return CAUSAL if self.window is None or length <= self.window else Band(0, self.window)

    @property
    def is_packed(self) -> bool:
        """Whether the kernel takes all documents at once."""
        return self.kernel.takes_packed and self.kernel.takes(self._band(self.documents.longest))

    def _one_by_one(
        self,
        method: Callable[[AttentionKernel], Callable[..., Sequence[Tensor]]],
        empty: Callable[..., Sequence[Tensor]],
        *tensors: Tensor,
    ) -> list[Tensor]:
        """Compute runs of documents one after the other.

        Args:
            method: kernel → what computes results `[documents, length, …]` of a run's tensors.
            empty: tensors of padding → what stands for its results.
            tensors: `[batch, tokens, …]`.

        Returns:
            the results as `[batch, tokens, …]`.
        """
        results: list[Sequence[Tensor]] = []
        for block in self.documents.blocks:
            for run, parts in block.cut(*tensors):
                if run.is_document:
                    band = self._band(run.length)
                    kernel = self.kernel if self.kernel.takes(band) else PlainAttention()
                    found = method(kernel)(*map(run.documents_in, parts), band=band, scale=self.scale)
                    results.append(list(map(run.in_rows, found)))
                else:
                    results.append(empty(*parts))
        rows = [torch.cat(parts, 1) if len(parts) > 1 else parts[0] for parts in zip(*results, strict=True)]
        return [row.reshape(*self.documents.shape, *row.shape[2:]) for row in rows]

    def all_at_once(self) -> dict[str, Any]:
        """Return the arguments of the kernel for tensors of `pack`."""
        return {
            "band": self._band(self.documents.longest),
            "scale": self.scale,
            "lengths": self.documents.packed,
        }

    def forward(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the output `[batch, tokens, heads, value head size]` and the log-sum-exp of the scores."""
        if self.is_packed:
            packed = [_pack(tensor) for tensor in (query, key, value)]
            out, lse = (_unpack(part, query) for part in self.kernel.forward(*packed, **self.all_at_once()))
        else:
            out, lse = self._one_by_one(attrgetter("forward"), _no_output, query, key, value)
        if sinks is not None:
            out, lse = divide_by_sinks(out, lse, sinks)
        return out.to(query.dtype), lse

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        out: Tensor,
        lse: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return the gradients of query, key, value and sinks, of what `forward` returned."""
        grad_out = grad_out.contiguous()
        if self.is_packed:
            packed = [_pack(tensor) for tensor in (grad_out, query, key, value, out, lse)]
            grads = [_unpack(part, query) for part in self.kernel.backward(*packed, **self.all_at_once())]
        else:
            grads = self._one_by_one(attrgetter("backward"), _no_gradients, grad_out, query, key, value, out, lse)
        grad_sinks = None if sinks is None else gradient_of_sinks(grad_out, out, lse, sinks)
        of_query, of_key, of_value = (grad.to(of.dtype) for grad, of in zip(grads, (query, key, value)))
        return of_query, of_key, of_value, grad_sinks


def _no_output(query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
    return query.new_zeros(*query.shape[:3], value.shape[-1]), query.new_zeros(query.shape[:3], dtype=torch.float32)


def _no_gradients(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
) -> Sequence[Tensor]:
    return [torch.zeros_like(tensor, memory_format=torch.contiguous_format) for tensor in (query, key, value)]


class _DocumentAttention(torch.autograd.Function):
    """See `document_attention`."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, how: AttentionWithin
    ) -> Tensor:
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        out, lse = how.forward(query, key, value, sinks)
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.how = how
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        *grads, grad_sinks = ctx.how.backward(grad_out, *ctx.saved_tensors)
        return *(grad.transpose(1, 2) for grad in grads), grad_sinks, None


def _pack(tensor: Tensor) -> Tensor:
    return tensor.flatten(0, 1).unsqueeze(0)


def _unpack(tensor: Tensor, like: Tensor) -> Tensor:
    return tensor.squeeze(0).unflatten(0, like.shape[:2])
