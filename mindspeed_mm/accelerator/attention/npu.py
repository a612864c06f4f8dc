"""The fused attention of Ascend devices; importing torch_npu registers its operators."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from mindspeed_mm.accelerator.attention.kernel import AttentionKernel, Band, PackedLengths

_COPIES = 8
"""Statistics of the softmax are repeated this often in their last dimension."""
_MASK_SIZE = 2048
"""Size of the triangular mask that the operator spreads over longer sequences (sparse_mode 3)."""


class NPUFusionAttention(AttentionKernel):
    """`torch_npu.npu_fusion_attention` and its gradient, with packed sequences (layout TND).

    It takes fp16, bf16 and fp32, grouped heads, and keys and values of one head size. It returns the maximum of the
    scores and the sum of their exponentials above it; a maximum that is the log-sum-exp of all blocks, and a sum of
    one, make its gradient that of a block under the softmax over all blocks.

    Source: Ascend Extension for PyTorch, API reference of torch_npu.npu_fusion_attention.
    """

    takes_packed = True
    name = "npu_fusion_attention"

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
        lengths = lengths or PackedLengths.of_rows(query, key)
        out, maximum, total, *_ = torch.ops.npu.npu_fusion_attention(
            query.flatten(0, 1),
            key.flatten(0, 1),
            value.flatten(0, 1),
            query.shape[2],
            "TND",
            atten_mask=_causal_mask(query.device) if band is not None else None,
            scale=scale,
            keep_prob=1.0,
            actual_seq_qlen=list(lengths.query_ends),
            actual_seq_kvlen=list(lengths.key_ends),
            sparse_mode=3 if band is not None else 0,
        )
        lse = maximum[..., 0] + total[..., 0].log()
        return out.unflatten(0, query.shape[:2]), lse.unflatten(0, query.shape[:2])

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
        lengths = lengths or PackedLengths.of_rows(query, key)
        maximum = lse.flatten(0, 1).unsqueeze(-1).expand(-1, -1, _COPIES).contiguous()
        of_query, of_key, of_value, *_ = torch.ops.npu.npu_fusion_attention_grad(
            query.flatten(0, 1),
            key.flatten(0, 1),
            value.flatten(0, 1),
            grad_out.flatten(0, 1),
            query.shape[2],
            "TND",
            atten_mask=_causal_mask(query.device) if band is not None else None,
            softmax_max=maximum,
            softmax_sum=torch.ones_like(maximum),
            attention_in=out.flatten(0, 1),
            scale_value=scale,
            keep_prob=1.0,
            actual_seq_qlen=list(lengths.query_ends),
            actual_seq_kvlen=list(lengths.key_ends),
            sparse_mode=3 if band is not None else 0,
        )
        rows = key.shape[:2]
        return of_query.unflatten(0, query.shape[:2]), of_key.unflatten(0, rows), of_value.unflatten(0, rows)


@functools.cache
def _causal_mask(device: torch.device) -> Tensor:
    """Return the mask of the operator's causal mode: true where a key is not seen."""
    return torch.ones(_MASK_SIZE, _MASK_SIZE, dtype=torch.bool, device=device).triu(1)
