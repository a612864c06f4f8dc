"""Projection of target positions only: the language-model head never receives the whole sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mindspeed_mm.models.common.loss import ChunkedCrossEntropy, Targets, weighted_cross_entropy


class HeadLoss:
    """Makes a language-model head return the loss of the current targets instead of all logits.

    It works through hooks inside the head's own call, where the weight is gathered even if the head is an FSDP unit. It
    must be created before the model is wrapped, so that the hooks run between FSDP's gather and free.
    """

    def __init__(self, head: nn.Module) -> None:
        self._targets: Targets | None = None
        self._chunk: int | None = None
        self._factor: float | torch.Tensor | None = None
        self._hidden: torch.Tensor | None = None
        head.register_forward_pre_hook(self._before)
        head.register_forward_hook(self._after)

    def expect(self, targets: Targets, chunk: int | None, factor: float | torch.Tensor | None = None) -> None:
        """Make the next call of the head return the weighted cross-entropy sum (float32 scalar) for `targets`.

        Args:
            targets: target positions of the micro-batch.
            chunk: number of positions whose logits may exist at once; None: the logits of all targets.
            factor: approximate gradient of the sum in backward; None: gradients stay in range without it.
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
        # the empty projection keeps the head's hooks in the graph although the loss below computes its own gradients
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
