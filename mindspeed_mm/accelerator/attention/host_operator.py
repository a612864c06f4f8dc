"""PyTorch's attention operator of the host computes in the way that is fastest, whoever calls it.

Diffusers' models, encoders and compiled blocks call the operator as well as this package does. Its kernels are
therefore replaced in the dispatcher by ones that choose: by which library PyTorch's own multiply, or, in runs with
compiled blocks, the kernel that is compiled as they are.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from mindspeed_mm.accelerator.attention.jit_cpu import JITCPUAttention
from mindspeed_mm.accelerator.attention.kernel import CAUSAL
from mindspeed_mm.accelerator.host_products import by_blas

_LONG = 400
"""Tokens from which on the kernel's products are large enough for oneDNN, where that multiplies float32 matrices: rows
of 40 tokens take 5 to 9 times as long by it, of 115 two to three times."""
_SHORT = 256
"""Tokens up to which the gradients of shorter formats take longer than those of float32: for rows of 40 tokens 5 times
as long, of 120 twice."""
_FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
_BACKWARD = f"{_FORWARD}_backward"
_ON_HOST = "CPU"


class _Kernel(Protocol):
    def call_boxed(self, keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any: ...


class _HostOperator:
    """The two kernels of the operator.

    Args:
        forward, backward: PyTorch's own.

    Attributes:
        jit: computes what it takes in their place; None: nothing does.
    """

    def __init__(self, forward: _Kernel, backward: _Kernel) -> None:
        self._forward, self._backward = forward, backward
        self.jit: JITCPUAttention | None = None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Tensors are [batch, heads, tokens, head size]."""
        if (jit := self._jit_for(dropout_p, attn_mask, query, key, value)) is not None:
            heads_last = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
            out, lse = jit.forward(*heads_last, **_how(query, is_causal, scale))
            return _as_in_memory(out.transpose(1, 2), query), lse.transpose(1, 2)
        settings = {"attn_mask": attn_mask, "scale": scale}
        with _products(key):
            return self._forward.call_boxed(_keys(), query, key, value, dropout_p, is_causal, **settings)

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        dropout_p: float,
        is_causal: bool,
        *,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> tuple[Tensor, ...]:
        given = (grad_out, query, key, value, out)
        if (jit := self._jit_for(dropout_p, attn_mask, query, key, value)) is not None:
            heads_last = [tensor.transpose(1, 2) for tensor in (*given, logsumexp)]
            grads = jit.backward(*heads_last, **_how(query, is_causal, scale))
            return tuple(grad.transpose(1, 2) for grad in grads)
        is_widened = query.dtype.itemsize < torch.float32.itemsize and key.shape[2] < _SHORT
        if is_widened:
            given = tuple(tensor.float() for tensor in given)
        settings = {"attn_mask": attn_mask, "scale": scale}
        with _products(key):
            grads = self._backward.call_boxed(_keys(), *given, logsumexp, dropout_p, is_causal, **settings)
        return tuple(grad.to(query.dtype) for grad in grads) if is_widened else grads

    def _jit_for(self, dropout: float, mask: Tensor | None, *tensors: Tensor) -> JITCPUAttention | None:
        """Return the kernel if it computes such a call."""
        is_taken = self.jit is not None and mask is None and not dropout and self.jit.takes_tensors(*tensors)
        return self.jit if is_taken else None


def choose_host_kernels(jit: JITCPUAttention | None = None) -> None:
    """Replace the operator's kernels in this process; torch before 2.9 keeps its own.

    Args:
        jit: computes rows without masks from now on; None: PyTorch's own kernels do.
    """
    if hasattr(torch.library, "get_kernel"):
        _replaced()[0].jit = jit


@functools.cache
def _replaced() -> tuple[_HostOperator, torch.library.Library]:
    """Return the operator and its registration, which holds as long as it is referred to."""
    operator = _HostOperator(*(torch.library.get_kernel(f"aten::{name}", _ON_HOST) for name in (_FORWARD, _BACKWARD)))
    library = torch.library.Library("aten", "IMPL")
    library.impl(_FORWARD, operator.forward, _ON_HOST, allow_override=True)
    library.impl(_BACKWARD, operator.backward, _ON_HOST, allow_override=True)
    return operator, library


def _how(query: Tensor, is_causal: bool, scale: float | None) -> dict[str, Any]:
    """Return the arguments of a kernel that say what is computed."""
    return {"band": CAUSAL if is_causal else None, "scale": query.shape[-1] ** -0.5 if scale is None else scale}


def _as_in_memory(out: Tensor, query: Tensor) -> Tensor:
    """Return `out` with the strides that graphs expect, those of `empty_like(query)`."""
    expected = torch.empty_like(query)
    return out if out.stride() == expected.stride() else expected.copy_(out)


def _products(key: Tensor) -> AbstractContextManager[None]:
    """Context in which the faster library for so many keys multiplies."""
    return by_blas() if key.shape[2] < _LONG else nullcontext()


@functools.cache
def _keys() -> torch._C.DispatchKeySet:
    return torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
