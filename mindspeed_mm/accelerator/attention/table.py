"""Which kernel computes attention where, and why others don't: the table that `mindspeed-mm doctor` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from mindspeed_mm.accelerator.attention.kernel import AttentionKernel, Band
from mindspeed_mm.accelerator.attention.plain import PlainAttention

if TYPE_CHECKING:
    from mindspeed_mm.accelerator.base import Accelerator

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_HEAD = 128
_SDPA = "scaled_dot_product_attention of PyTorch, document by document"


class KernelChoice(NamedTuple):
    """A line of the table.

    Attributes:
        use: what is computed.
        dtypes: in which dtypes.
        kernel: by which kernel, and how.
    """

    use: str
    dtypes: str
    kernel: str


def attention_of_rows(device: Accelerator, dtype: str) -> str:
    """Return how rows, plain, padded or packed, are attended to: the first line of the table for a dtype's name."""
    sample = torch.empty(1, 1, 1, _HEAD, dtype=_DTYPES[dtype])
    return _by_documents(device.attention_kernel(sample, sample))


def attention_table(device: Accelerator) -> list[KernelChoice]:
    """Return the choices of a device, for heads of 128; dtypes with the same choice share a line."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, dtype in _DTYPES.items():
        sample = torch.empty(1, 1, 1, _HEAD, dtype=dtype)
        kernel = device.attention_kernel(sample, sample)
        uses = {
            "plain, padded and packed rows": _by_documents(kernel),
            "rows longer than a sliding window": _under_window(kernel),
            "attention sinks": _how(kernel),
            "images, frames and windows of encoders": _by_documents(kernel),
            "all of these in runs that compile blocks": _by_documents(device.compiled_attention_kernel(sample, sample)),
            "context parallelism, ring": _how(kernel),
            "context parallelism, Ulysses": "attn_implementation, on whole rows with a part of the heads",
        }
        for use, chosen in uses.items():
            found.setdefault((use, chosen), []).append(name)
    lines = [KernelChoice(use, ", ".join(names), chosen) for (use, chosen), names in found.items()]
    return sorted(lines, key=lambda line: list(uses).index(line.use))


def _how(kernel: AttentionKernel) -> str:
    if isinstance(kernel, PlainAttention):
        return kernel.name
    return f"{kernel.name}, {'all documents at once' if kernel.takes_packed else 'document by document'}"


def _by_documents(kernel: AttentionKernel) -> str:
    return _SDPA if isinstance(kernel, PlainAttention) else _how(kernel)


def _under_window(kernel: AttentionKernel) -> str:
    return _how(kernel if kernel.takes(Band(0, 2)) else PlainAttention())
