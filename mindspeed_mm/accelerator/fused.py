"""Norms, gated activations and rotary positions in one kernel each, instead of one for every operation in them.

On CUDA they are Liger's, written in Triton (Hsu et al., arXiv 2410.10989); on Ascend those of torch_npu.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class FusedKernels(ABC):
    """The fused kernels of a device, each with its gradient.

    Attributes:
        rms_norm_name, silu_mul_name, rotary_name: what `mindspeed-mm doctor` calls them.
    """

    rms_norm_name: str
    silu_mul_name: str
    rotary_name: str

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return `weight * x / sqrt(mean(x²) + eps)` over the last dimension, in the dtype of `x`.

        The root mean square is computed in float32, and rounded before the product with the weight, as in Llama.
        """

    @abstractmethod
    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return `silu(gate) * up`, [..., width]."""

    @abstractmethod
    def rotary(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys, which may be overwritten.

        The first half of a head is paired with the second one, as in Llama.

        Args:
            query, key: [batch, heads, tokens, head size].
            cos, sin: [batch or 1, tokens, head size].
        """


class LigerKernels(FusedKernels):
    """Those of the package liger_kernel."""

    rms_norm_name, silu_mul_name, rotary_name = "LigerRMSNormFunction", "LigerSiLUMulFunction", "LigerRopeFunction"

    def __init__(self) -> None:
        from liger_kernel.ops import LigerRMSNormFunction, LigerRopeFunction, LigerSiLUMulFunction

        self._rms_norm, self._silu_mul, self._rotary = LigerRMSNormFunction, LigerSiLUMulFunction, LigerRopeFunction

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        # with True the gradient of x would be written over that of the result, which a residual may need
        return self._rms_norm.apply(x, weight, eps, 0.0, "llama", False)  # type: ignore[no-any-return]

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return self._silu_mul.apply(gate, up, 1.0, 1.0)  # type: ignore[no-any-return]

    def rotary(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return self._rotary.apply(query, key, cos, sin)  # type: ignore[no-any-return]


class NPUFusedKernels(FusedKernels):
    """Those of torch_npu. Source: Ascend Extension for PyTorch, API reference of these operators."""

    rms_norm_name, silu_mul_name, rotary_name = "npu_rms_norm", "npu_swiglu", "npu_rotary_mul"

    def __init__(self) -> None:
        import torch_npu  # noqa: F401 (it registers the operators)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch.ops.npu.npu_rms_norm(x, weight, eps)[0]  # type: ignore[no-any-return]

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return torch.ops.npu.npu_swiglu(torch.cat((gate, up), dim=-1), -1)  # type: ignore[no-any-return]

    def rotary(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return torch.ops.npu.npu_rotary_mul(query, cos, sin), torch.ops.npu.npu_rotary_mul(key, cos, sin)
