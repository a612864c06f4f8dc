"""The host's flash attention, an operator of PyTorch's own."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from mindspeed_mm.accelerator.attention.kernel import AttentionKernel, Band, PackedLengths

#: whether the operator takes fewer heads of keys than of queries; before torch 2.9 it reads and writes past their end
TAKES_GROUPS = TorchVersion(torch.__version__) >= (2, 9)


class CPUFlashAttention(AttentionKernel):
    """`aten::_scaled_dot_product_flash_attention_for_cpu`: fp32, bf16 and fp16, grouped heads, one head size.

    Args:
        takes_groups: whether the operator itself takes grouped heads; else keys and values are repeated for it.
    """

    name = "flash attention of PyTorch for the host"

    def __init__(self, *, takes_groups: bool = TAKES_GROUPS) -> None:
        self._takes_groups = takes_groups

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
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *self._whole(*_heads_first(query, key, value)), 0.0, band is not None, scale=scale
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
        grad_out, out, lse = _heads_first(grad_out, out, lse)
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, *self._whole(*_heads_first(query, key, value)), out, lse, 0.0, band is not None, scale=scale
        )
        grad_query, grad_key, grad_value = _heads_first(*grads)
        heads = key.shape[2]
        if grad_key.shape[2] != heads:
            grad_key, grad_value = (grad.unflatten(2, (heads, -1)).sum(3) for grad in (grad_key, grad_value))
        return grad_query, grad_key, grad_value

    def _whole(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Repeat keys and values, [rows, heads, tokens, head size], unless the operator takes grouped heads."""
        if self._takes_groups:
            return query, key, value
        groups = query.shape[1] // key.shape[1]
        return query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    """Exchange the dimensions of tokens and of heads."""
    return [tensor.transpose(1, 2) for tensor in tensors]
