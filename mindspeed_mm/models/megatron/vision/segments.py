"""Attention within segments (windows, images); segments of equal length share one call."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn


@dataclass(frozen=True)
class Segments:
    """Segments of rows that attend to each other.

    Attributes:
        groups: (number, length) of consecutive segments; all segments of one length are in one group.
        order: int64 [rows], the rows in the order of the groups; None: the rows are in that order.
        back: int64 [rows], the inverse of `order`.
    """

    groups: tuple[tuple[int, int], ...]
    order: torch.Tensor | None = None
    back: torch.Tensor | None = None

    @classmethod
    def of_lengths(cls, lengths: torch.Tensor, segment_of: torch.Tensor) -> Segments:
        """Group segments of equal length; within a segment the rows keep their order.

        Args:
            lengths: int64 [segments], on the host.
            segment_of: int64 [rows], the number of each row's segment.
        """
        by_length = lengths.argsort(stable=True)
        order = by_length.argsort()[segment_of].argsort(stable=True)
        sizes, counts = lengths[by_length].unique_consecutive(return_counts=True)
        groups = tuple(zip(counts.tolist(), sizes.tolist()))
        if torch.equal(order, torch.arange(len(order))):
            return cls(groups)
        return cls(groups, order, order.argsort())

    def spread(self, rows: int) -> Segments:
        """Return the segments after each row has become `rows` rows."""
        groups = tuple((count, length * rows) for count, length in self.groups)
        if self.order is None or self.back is None:
            return Segments(groups)
        return Segments(groups, spread_index(self.order, rows), spread_index(self.back, rows))


def spread_index(index: torch.Tensor, rows: int) -> torch.Tensor:
    """Expand an index [n] of blocks to an index [n * rows] of their rows, `rows` in each block."""
    return (index.unsqueeze(1) * rows + torch.arange(rows, device=index.device)).flatten()


@dataclass
class VisionSegments(PackedSeqParams):
    """Segments of a tower's rows; Megatron-core passes them to the core attention of every layer.

    Attributes:
        windows: segments for layers that attend to windows.
        whole: segments for layers that attend to a whole image or video frame.
    """

    qkv_format: str = "sbhd"  # not "thd": tensors keep the shapes that they have without packing
    windows: Segments | None = None
    whole: Segments | None = None


class Reorder(torch.autograd.Function):
    """Reorder rows; the backward pass gathers by the inverse order instead of accumulating."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, back: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Reorder `rows` [rows, ...] by `order` [rows]; `back` is the inverse of `order`."""
        ctx.save_for_backward(back)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        """Return the gradient in the original order."""
        (back,) = ctx.saved_tensors
        return grad.index_select(0, back), None, None


class SegmentAttention(nn.Module):
    """Scaled dot-product attention within segments, of one tensor-parallel rank's heads.

    Megatron-core's SelfAttention builds it instead of its own core attention.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        *,
        whole: bool,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        """
        Args:
            whole: whether it attends to whole images; otherwise it attends to windows.
        """
        super().__init__()
        self.whole = whole
        self.scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """
        Args:
            query, key, value: [rows, 1, heads, head size]; query and key may have another dtype than value.
            packed_seq_params: VisionSegments.

        Returns:
            [rows, 1, heads * head size] in the dtype of value.
        """
        segments: Segments = packed_seq_params.whole if self.whole else packed_seq_params.windows
        heads = [t.squeeze(1).to(value.dtype) for t in (query, key, value)]
        if segments.order is not None:
            heads = [Reorder.apply(t, segments.order, segments.back) for t in heads]
        out = self._attend(heads, segments.groups)
        if segments.order is not None:
            out = Reorder.apply(out, segments.back, segments.order)
        return out.flatten(1).unsqueeze(1)

    def _attend(self, heads: Iterable[torch.Tensor], groups: tuple[tuple[int, int], ...]) -> torch.Tensor:
        """Attend within segments; query, key, value and the result are [rows, heads, head size]."""
        rows = [count * length for count, length in groups]
        parts = []
        for (count, length), *qkv in zip(groups, *(t.split(rows) for t in heads)):
            q, k, v = (t.unflatten(0, (count, length)).transpose(1, 2) for t in qkv)
            part = F.scaled_dot_product_attention(q, k, v, scale=self.scale)
            parts.append(part.transpose(1, 2).flatten(0, 1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class Float32RotarySelfAttention(SelfAttention):
    """Self-attention that rotates queries and keys in float32, whatever the parameters' dtype.

    The core attention receives them in float32.
    """

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        """Return query and key, both float32, and value: [rows, batch, heads, head size]."""
        query, key, value = super().get_query_key_value_tensors(*args, **kwargs)
        return query.float(), key.float(), value
