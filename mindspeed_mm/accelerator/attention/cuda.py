"""FlashAttention-2 as PyTorch ships it for CUDA, and FlashAttention-3 in its place where it is installed."""

from __future__ import annotations

import functools
import importlib.util
from itertools import accumulate

import torch
import torch.nn.attention
from torch import Tensor

from mindspeed_mm.accelerator.attention.kernel import AttentionKernel, Band, PackedLengths

LARGEST_HEAD = 256
HEAD_MULTIPLE = 8
DTYPES = (torch.float16, torch.bfloat16)
FLASH_3 = "flash_attn_interface"
"""The package of FlashAttention-3."""


class CUDAFlashAttention(AttentionKernel):
    """`aten::_flash_attention_forward` and its backward, with packed sequences.

    It takes fp16 and bf16, grouped heads, one head size, a multiple of 8 up to 256. The log-sum-exp of packed sequences
    is `[heads, tokens]`. Source of the calling convention: torch.nn.attention.varlen.
    """

    takes_packed = True
    name = "FlashAttention-2 of PyTorch"

    def takes(self, band: Band | None) -> bool:
        return band is None or band.offset == 0

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
        packed = [tensor.flatten(0, 1) for tensor in (query, key, value)]
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *packed,
            _offsets(lengths.queries, query.device),
            _offsets(lengths.keys, query.device),
            max(lengths.queries),
            max(lengths.keys),
            0.0,
            band is not None,
            False,
            scale=scale,
            **_window(band),
        )
        return out.unflatten(0, query.shape[:2]), lse.mT.unflatten(0, query.shape[:2])

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
        packed = [tensor.flatten(0, 1) for tensor in (grad_out, query, key, value, out)]
        of_query, of_key, of_value = torch.ops.aten._flash_attention_backward(
            *packed,
            lse.flatten(0, 1).mT.contiguous(),
            _offsets(lengths.queries, query.device),
            _offsets(lengths.keys, query.device),
            max(lengths.queries),
            max(lengths.keys),
            0.0,
            band is not None,
            torch.zeros(2, dtype=torch.uint64, device=query.device),  # the random state of a dropout of 0
            torch.empty(0, device=query.device),
            scale=scale,
            **_window(band),
        )
        rows = key.shape[:2]
        return of_query.unflatten(0, query.shape[:2]), of_key.unflatten(0, rows), of_value.unflatten(0, rows)


def _window(band: Band | None) -> dict[str, int]:
    """Return how many keys a query sees before and after its own, where there is a limit beside causality."""
    if band is None or band.window is None:
        return {}
    return {"window_size_left": band.window - 1, "window_size_right": 0}


def why_not_flash_3() -> str | None:
    """Return why PyTorch can't compute by FlashAttention-3 here; None: it can."""
    if importlib.util.find_spec(FLASH_3) is None:
        return f"{FLASH_3} is not installed"
    if not hasattr(torch.nn.attention, "activate_flash_attention_impl"):
        return "this release of torch can't take it in the place of its own FlashAttention-2"
    if torch.cuda.get_device_capability()[0] != 9:
        return "it is written for GPUs of compute capability 9 (Hopper)"
    return None


@functools.cache
def flash_kernel() -> CUDAFlashAttention:
    """Return the kernel of packed sequences; FlashAttention-3 takes the place of PyTorch's own in this process."""
    if why_not_flash_3() is not None:
        return CUDAFlashAttention()
    torch.nn.attention.activate_flash_attention_impl("FA3")
    kernel = CUDAFlashAttention()
    kernel.name = "FlashAttention-3"
    return kernel


@functools.lru_cache(maxsize=64)
def _offsets(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return where sequences start, and where the last one ends, on the device."""
    return torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32).to(device, non_blocking=True)
