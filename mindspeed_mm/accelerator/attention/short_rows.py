"""PyTorch's attention operator of the host computes short rows in the way that is fastest for them, whoever calls it.

Diffusers' models, encoders and compiled blocks call the operator as well as this package does. Its kernels are
therefore replaced in the dispatcher by ones that choose, and call PyTorch's own.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

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


def compute_short_rows_apart() -> None:
    """Replace the operator's kernels in this process, once; torch before 2.9 keeps its own."""
    if hasattr(torch.library, "get_kernel"):
        _replace()


@functools.cache
def _replace() -> torch.library.Library:
    """Return the registration, which holds as long as it is referred to."""
    forward, backward = (torch.library.get_kernel(f"aten::{name}", _ON_HOST) for name in (_FORWARD, _BACKWARD))
    library = torch.library.Library("aten", "IMPL")
    library.impl(_FORWARD, functools.partial(_forward, forward), _ON_HOST, allow_override=True)
    library.impl(_BACKWARD, functools.partial(_backward, backward), _ON_HOST, allow_override=True)
    return library


def _forward(kernel: _Kernel, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Tensors are [batch, heads, tokens, head size]."""
    with _products(key):
        return kernel.call_boxed(_keys(), query, key, value, *args, **kwargs)


def _backward(
    kernel: _Kernel,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    given, dtype = (grad_out, query, key, value, out), query.dtype
    is_widened = dtype != torch.float32 and key.shape[2] < _SHORT
    if is_widened:
        given = tuple(tensor.float() for tensor in given)
    with _products(key):
        grads = kernel.call_boxed(_keys(), *given, lse, *args, **kwargs)
    return tuple(grad.to(dtype) for grad in grads) if is_widened else grads


def _products(key: Tensor) -> AbstractContextManager[None]:
    """Context in which the faster library for so many keys multiplies."""
    return by_blas() if key.shape[2] < _LONG else nullcontext()


@functools.cache
def _keys() -> torch._C.DispatchKeySet:
    return torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
