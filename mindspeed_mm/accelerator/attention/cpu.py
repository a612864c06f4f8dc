"""The host's flash attention, an operator of PyTorch's own."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from mindspeed_mm.accelerator.attention.kernel import AttentionKernel, Band, PackedLengths
from mindspeed_mm.accelerator.host_products import by_blas

_LONG = 400
"""Tokens from which on the kernel's products are large enough for oneDNN, where that multiplies float32 matrices."""


class CPUFlashAttention(AttentionKernel):
    """`aten::_scaled_dot_product_flash_attention_for_cpu`: fp32, bf16 and fp16, grouped heads, one head size."""

    name = "flash attention of PyTorch for the host"

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
        with _products(key):
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *_heads_first(query, key, value), 0.0, band is not None, scale=scale
            )
        return out.transpose(1, 2), lse.transpose(1, 2)

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
        with _products(key):
            grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *_heads_first(grad_out, query, key, value, out, lse), 0.0, band is not None, scale=scale
            )
        grad_query, grad_key, grad_value = _heads_first(*grads)
        return grad_query, grad_key, grad_value


def _products(key: Tensor) -> AbstractContextManager[None]:
    """Context in which the faster library for so many keys multiplies."""
    return by_blas() if key.shape[1] < _LONG else nullcontext()


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    """Exchange the dimensions of tokens and of heads."""
    return [tensor.transpose(1, 2) for tensor in tensors]
