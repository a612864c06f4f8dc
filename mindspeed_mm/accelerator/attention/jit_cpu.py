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
_NUMBER = ctypes.c_int64


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
            function.argtypes = (ctypes.c_void_p, ctypes.c_float, ctypes.c_void_p)
            function.restype = ctypes.c_int64

    def takes(self, band: Band | None) -> bool:
        return True

    @staticmethod
    def takes_tensors(query: Tensor, *others: Tensor) -> bool:
        """Whether tensors are of one dtype that the kernel computes."""
        dtype = query.dtype
        return dtype in _DTYPES and all(other.dtype == dtype for other in others)

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
        _compute(self._forward, (query, key, value), (out, lse), band, scale, lengths)
        return out, lse

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
        grads = query.new_empty(query.shape), query.new_empty(key.shape), query.new_empty(value.shape)
        given = (query, key, value, grad_out.to(query.dtype), out.to(query.dtype), lse)
        _compute(self._backward, given, grads, band, scale, lengths)
        return grads


def _compute(
    function: Any,
    given: Sequence[Tensor],
    results: Sequence[Tensor],
    band: Band | None,
    scale: float,
    lengths: PackedLengths | None,
) -> None:
    """Call a function of the library.

    Little happens here, because a layer of a small model waits for it.

    Args:
        given: what it reads, query, key and value first; `[batch, tokens, heads, …]`.
        results: what it writes; the last dimension is contiguous.

    Raises:
        MemoryError: the system has no memory for blocks of scores and sums.
    """
    query, _, value = given[:3]
    rows, queries, heads, size = query.shape
    _, keys, key_heads, value_size = value.shape
    packed, sequences = None, rows
    if lengths is not None:
        padding = lengths.are_padding or (False,) * len(lengths.queries)
        numbers = [number for each in zip(lengths.queries, lengths.keys, padding, strict=True) for number in each]
        packed, sequences = (_NUMBER * len(numbers))(*numbers), len(padding)
    task = (_NUMBER * 13)(
        0 if packed is None else ctypes.addressof(packed),
        sequences,
        queries,
        keys,
        key_heads,
        heads // key_heads,
        size,
        value_size,
        _DTYPES.index(query.dtype),
        band is not None,
        0 if band is None else band.offset,
        _NO_WINDOW if band is None or band.window is None else band.window,
        torch.get_num_threads(),
    )
    places: list[int] = []
    tensors = [*given, *results]
    for i, tensor in enumerate(tensors):
        strides = tensor.stride()
        if strides[-1] != 1 and len(strides) > 3:
            tensors[i] = tensor = tensor.contiguous()
            strides = tensor.stride()
        places += (tensor.data_ptr(), *strides[:3])
    missing = function(task, scale, (_NUMBER * len(places))(*places))
    if missing:
        raise MemoryError(f"attention on the host: {missing} bytes for blocks of scores and sums of rows aren't free")
