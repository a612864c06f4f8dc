"""Evaluation over data whose last global batch is filled up with micro-batches that were there before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from mindspeed_mm.backends.protocol import ForwardStep, normalise_loss_output


def without_fillers(forward_step: ForwardStep, is_filler: Callable[[int], bool]) -> ForwardStep:
    """Return a `forward_step` whose loss function returns zeros for filler micro-batches.

    Fillers are still run, so that all ranks run equally many micro-batches. A mean loss becomes a sum over
    micro-batches with their number as denominator, which gives the same mean over the other micro-batches.

    Args:
        forward_step: the user's forward step.
        is_filler: whether a micro-batch is a filler, by its number on this rank since the evaluation began; called
            after the micro-batch has been read.
    """
    seen: Counter[int] = Counter()  # every chunk of a pipeline reads every micro-batch

    def step(data_iterator: Iterator[Any], model: nn.Module) -> tuple[Any, Callable[..., Any]]:
        output, loss_func = forward_step(data_iterator, model)
        number = seen[id(model)]
        seen[id(model)] += 1
        counts = not is_filler(number)

        def loss_of(*outputs: object) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
            loss, denominator, metrics = normalise_loss_output(loss_func(*outputs))
            weight = torch.ones_like(loss.detach()) if denominator is None else denominator
            if not counts:
                return torch.zeros_like(loss), torch.zeros_like(weight), {}
            return loss, weight, metrics

        return output, loss_of

    return step
