"""Attention of runs with compiled blocks on the host: C++ that is compiled for its processor, as the blocks are.

PyTorch's operator for the host multiplies by a BLAS library, and is called for each document of a row. This kernel
computes all of them in one call, with products that stay in registers.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mindspeed_mm.accelerator.attention.kernel import AttentionKernel, Band, PackedLengths
from mindspeed_mm.utils.log import notice

_SOURCE = Path(__file__).with_suffix(".cpp")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""In the order of the source's `Dtype`."""
_NO_WINDOW = 1 << 62


class _Tensor(ctypes.Structure):
    """As in the source."""

    _fields_ = (("data", ctypes.c_void_p), ("row", ctypes.c_int64), ("token", ctypes.c_int64), ("head", ctypes.c_int64))


class _Task(ctypes.Structure):
    """As in the source."""

    _fields_ = (
        ("lengths", ctypes.POINTER(ctypes.c_int64)),
        ("sequences", ctypes.c_int64),
        ("is_packed", ctypes.c_int64),
        ("key_heads", ctypes.c_int64),
        ("groups", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("value_size", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
        ("is_banded", ctypes.c_int64),
        ("offset", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("scale", ctypes.c_float),
    )


def jit_attention() -> JITCPUAttention | None:
    """Return the kernel where it is faster than PyTorch's; None: it isn't, or doesn't compile here."""
    return None if why_not_jit() else compile_kernel()


def why_not_jit() -> str | None:
    """Return why attention stays PyTorch's on this processor in runs with compiled blocks; None: it doesn't.

    With vectors of eight numbers short rows took as long or longer by this kernel, with those of AVX-512 a third.
    """
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return "this processor has no AVX-512, without which PyTorch's attention is as fast"
    return None


@functools.cache
def compile_kernel() -> JITCPUAttention | None:
    """Compile the kernel, or load it where a process did before; None: it doesn't compile here, which is said once.

    It is kept with the kernels of compiled blocks (TORCHINDUCTOR_CACHE_DIR).
    """
    from torch._inductor.codecache import CppCodeCache
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

    try:
        return JITCPUAttention(CppCodeCache.load(_SOURCE.read_text(encoding="utf-8")))
    except (CppCompileError, InvalidCxxCompiler) as error:
        why = next((line for line in str(error).splitlines() if "error:" in line), str(error))
        notice(f"{_SOURCE} isn't compiled here, and attention stays PyTorch's, which is slower: {why}")
        return None


class JITCPUAttention(AttentionKernel):
    """Softmax attention by C++, in float32 products: fp32, bf16 and fp16, any band, grouped heads, two head sizes.

    Args:
        library: of `jit_cpu.cpp`.
    """

    name = "C++ compiled for this processor"
    takes_packed = True

    def __init__(self, library: Any) -> None:
        self._forward, self._backward = library.attention_forward, library.attention_backward
        for function in (self._forward, self._backward):
            function.argtypes = (ctypes.POINTER(_Task), ctypes.POINTER(_Tensor))
            function.restype = ctypes.c_int64

    def takes(self, band: Band | None) -> bool:
        return True

    @staticmethod
    def takes_tensors(*tensors: Tensor) -> bool:
        """Whether tensors are of one dtype that the kernel computes."""
        return tensors[0].dtype in _DTYPES and all(tensor.dtype == tensors[0].dtype for tensor in tensors)

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
        out = query.new_empty(*query.shape[:3], value.shape[-1])
        lse = query.new_empty(query.shape[:3], dtype=torch.float32)
        self.forward_into(out, lse, query, key, value, band=band, scale=scale, lengths=lengths)
        return out, lse

    def forward_into(
        self,
        out: Tensor,
        lse: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        band: Band | None,
        scale: float,
        lengths: PackedLengths | None = None,
    ) -> None:
        """Write what `forward` returns into `out` and `lse`."""
        query, key, value, written = _whole_heads(query, key, value, out)
        _compute(self._forward, [query, key, value, written, lse], query, key, value, band, scale, lengths)
        if written is not out:
            out.copy_(written)

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
        grads = tuple(query.new_empty(tensor.shape) for tensor in (query, key, value))
        of_out, out = (tensor.to(query.dtype) for tensor in (grad_out, out))
        of_out, query, key, value, out = _whole_heads(of_out, query, key, value, out)
        tensors = [of_out, query, key, value, out, lse, *grads]
        _compute(self._backward, tensors, query, key, value, band, scale, lengths)
        of_query, of_key, of_value = grads
        return of_query, of_key, of_value


def _whole_heads(*tensors: Tensor) -> list[Tensor]:
    """Make the last dimension of each contiguous."""
    return [tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors]


def _compute(
    function: Any,
    tensors: Sequence[Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    band: Band | None,
    scale: float,
    lengths: PackedLengths | None,
) -> None:
    """Call a function of the library with its tensors `[batch, tokens, heads, …]`.

    Raises:
        MemoryError: the system has no memory for blocks of scores and sums.
    """
    each = PackedLengths.of_rows(query, key) if lengths is None else lengths
    are_padding = each.are_padding or (False,) * len(each.queries)
    sequences = [number for each_of in zip(each.queries, each.keys, are_padding, strict=True) for number in each_of]
    task = _Task(
        lengths=(ctypes.c_int64 * len(sequences))(*sequences),
        sequences=len(each.queries),
        is_packed=lengths is not None,
        key_heads=key.shape[2],
        groups=query.shape[2] // key.shape[2],
        size=query.shape[3],
        value_size=value.shape[3],
        dtype=_DTYPES.index(query.dtype),
        is_banded=band is not None,
        offset=0 if band is None else band.offset,
        window=_NO_WINDOW if band is None or band.window is None else band.window,
        threads=torch.get_num_threads(),
        scale=scale,
    )
    views = (_Tensor * len(tensors))(*(_Tensor(tensor.data_ptr(), *tensor.stride()[:3]) for tensor in tensors))
    missing = function(ctypes.byref(task), views)
    if missing:
        raise MemoryError(f"attention on the host: {missing} bytes for blocks of scores and sums of rows aren't free")
