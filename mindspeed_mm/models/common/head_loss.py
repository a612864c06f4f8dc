"""Projection of target positions only: the head gets these, or chunks of them, never the whole sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mindspeed_mm.models.common.loss import ChunkedCrossEntropy, Targets, weighted_cross_entropy


class HeadLoss:
    """Makes a language-model head return the loss of the current targets instead of all logits.

    Works through hooks inside the head's own call, where its weight is whole even if the head is a unit of FSDP. To be
    installed before the model is wrapped, so that the hooks run between FSDP's gather and free.
    """

    def __init__(self, head: nn.Module) -> None:
        self._targets: Targets | None = None
        self._chunk: int | None = None
        self._factor: float | torch.Tensor | None = None
        self._hidden: torch.Tensor | None = None
        head.register_forward_pre_hook(self._before)
        head.register_forward_hook(self._after)

    def expect(self, targets: Targets, chunk: int | None, factor: float | torch.Tensor | None = None) -> None:
        """Let the next call of the head return the weighted cross-entropy sum (float32 scalar) for `targets`.

        Args:
            chunk: at most so many positions' logits exist at once; None: all targets' logits.
            factor: about what the sum's gradient will be; None: whatever it is, it keeps gradients in their range.
        """
        self._targets, self._chunk, self._factor = targets, chunk, factor

    def _before(self, head: nn.Module, args: tuple[Any, ...]) -> tuple[torch.Tensor] | None:
        if self._targets is None:
            return None
        hidden = args[0].flatten(0, -2).index_select(0, self._targets.index)
        if self._chunk is None:
            return (hidden,)
        self._hidden = hidden
        return (hidden[:0],)

    def _after(self, head: Any, args: tuple[Any, ...], logits: torch.Tensor) -> torch.Tensor | None:
        targets, self._targets = self._targets, None
        if targets is None:
            return None
        if self._chunk is None:
            return weighted_cross_entropy(logits, targets.tokens, targets.weights)
        hidden, self._hidden = self._hidden, None
        # the empty projection ties the head's hooks into the graph even if the loss below makes its own gradients
        return (
            ChunkedCrossEntropy.apply(
                hidden,
                head.weight,
                getattr(head, "bias", None),
                targets.tokens,
                targets.weights,
                self._chunk,
                self._factor,
            )
            + logits.sum().float()
        )
