"""Kernels of attention over a block of the keys, which return the log-sum-exp that blocks are merged by.

A library's attention functions return the output alone. Ring attention (`mindspeed_mm.parallel.ring`) computes the
output of its queries block by block, and needs with each block's output the logarithm of the sum that its softmax
divided by, and gradients of a block under the softmax over all blocks. Each kind of device has a kernel for that;
`Accelerator.attention_kernel` chooses it.
"""

from __future__ import annotations

from mindspeed_mm.accelerator.attention.documents import AttentionWithin, Documents, document_attention
from mindspeed_mm.accelerator.attention.kernel import CAUSAL, AttentionKernel, Band, PackedLengths
from mindspeed_mm.accelerator.attention.plain import PlainAttention

__all__ = [
    "CAUSAL",
    "AttentionKernel",
    "AttentionWithin",
    "Band",
    "Documents",
    "PackedLengths",
    "PlainAttention",
    "document_attention",
]
