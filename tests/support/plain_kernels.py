"""A stand-in for the fused kernels of a device."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.nn.functional import rms_norm, silu

from mindspeed_mm.accelerator.fused import FusedKernels


class PlainKernels(FusedKernels):
    """What the kernels are to compute, with PyTorch's functions, and how often they were called."""

    rms_norm_name = silu_mul_name = rotary_name = "PyTorch"

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        self.calls["norm"] += 1
        return rms_norm(x, weight.shape, weight, eps)

    def silu_mul(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        self.calls["gate"] += 1
        return silu(gate) * up

    def rotary(self, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        self.calls["rotary"] += 1
        turned = []
        for first, second in (query.chunk(2, dim=-1), key.chunk(2, dim=-1)):
            c, s = cos[:, None, :, : first.shape[-1]], sin[:, None, :, : first.shape[-1]]
            turned.append(torch.cat((first * c - second * s, second * c + first * s), dim=-1))
        return tuple(turned)
