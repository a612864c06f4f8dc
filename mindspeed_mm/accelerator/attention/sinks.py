"""Attention sinks: a score of each head without a value, by which the softmax is divided too.

Source: Agarwal et al., "gpt-oss-120b & gpt-oss-20b Model Card" (arXiv 2508.10925), after Xiao et al., "Efficient
Streaming Language Models with Attention Sinks" (arXiv 2309.17453).
"""

from __future__ import annotations

import torch
from torch import Tensor


def divide_by_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp with the sinks among the scores.

    Args:
        out: `[batch, tokens, heads, head size]`, without them; changed in place.
        lse: `[batch, tokens, heads]`, fp32.
        sinks: `[heads]`.
    """
    total = torch.logaddexp(lse, sinks.float())
    return out.mul_((lse - total).exp_().unsqueeze(-1)), total


def gradient_of_sinks(grad_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of the sinks, `[heads]`.

    Args:
        grad_out, out: `[batch, tokens, heads, head size]`, out with the sinks.
        lse: `[batch, tokens, heads]`, with the sinks.
        sinks: `[heads]`.
    """
    delta = (grad_out.float() * out).sum(-1)
    return -((sinks.float() - lse).exp_() * delta).sum((0, 1)).to(sinks.dtype)
