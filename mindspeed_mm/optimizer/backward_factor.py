"""What the backward pass multiplies a loss with in half precision: `--loss-scale` times an estimate of 1/N.

A step's loss is a sum over the global batch divided by N, which is known only when all micro-batches are done: the
gradients are divided afterwards. In float16 they would overflow before, the sooner the larger the batch. So the factor
of the backward pass holds an estimate of N, and gradients are those of `loss scale * mean loss`, as in Megatron, up to
a factor of the square root of 2. The estimate is a power of two, so that taking the factor out again is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from mindspeed_mm.optimizer.loss_scale import LossScale
from mindspeed_mm.utils.log import notice

Number: TypeAlias = float | torch.Tensor
"""A host's number, or a float scalar on the device."""


class BackwardFactor:
    """The loss scale over an estimate of the step's divisor, the same on all ranks in a step.

    The estimate is next to the last step's divisor. In the first step it is next to the first micro-batch's denominator
    on all ranks, times the number of micro-batches; of losses that are means, the divisor is known from the start.

    Attributes:
        is_agreed: whether all ranks know the estimate; False until a run's first step.
    """

    def __init__(
        self, loss_scale: LossScale, *, estimates: bool, data_parallel_size: int, group: dist.ProcessGroup | None = None
    ) -> None:
        """
        Args:
            loss_scale: whose scale the factor follows.
            estimates: the run computes in float16; False: the factor is the loss scale alone.
            data_parallel_size: ranks whose losses make up a step.
            group: those ranks.
        """
        self._loss_scale, self._estimates = loss_scale, estimates
        self._ranks, self._group = data_parallel_size, group
        self._divisor: Number | None = None
        self._micro_batches = 1
        self._is_mean = False
        self.is_agreed = not estimates

    def begin(self, micro_batches: int) -> None:
        """Begin a step of so many micro-batches a rank."""
        self._micro_batches = micro_batches

    def meet(self, denominator: torch.Tensor, *, is_mean: bool) -> None:
        """Take note of a micro-batch's loss, before its backward pass.

        In a run's first step the ranks that have a loss agree on an estimate, in one collective; all of them call.

        Args:
            denominator: float scalar, of the micro-batches so far on this rank.
            is_mean: the loss is a mean, to be averaged over micro-batches and ranks; else a sum with a denominator.
        """
        self._is_mean = is_mean
        if self._estimates and self._divisor is None:
            total = torch.ones_like(denominator) if is_mean else denominator.clone()
            if self._ranks > 1:
                dist.all_reduce(total, group=self._group)
            self._divisor = _power_of_two(total * self._micro_batches, total > 0, torch.ones_like(total))

    def agree(self, gather: Callable[[float | None], list[float | None]]) -> None:
        """Tell ranks without a loss the first step's estimate; all ranks call.

        Args:
            gather: what every rank gave, by rank.
        """
        own = None if self._divisor is None else float(self._divisor)
        self._divisor = max(value for value in gather(own) if value is not None)
        self.is_agreed = True

    def now(self) -> Number:
        """The factor of this step; in a run's first one from the first loss on."""
        if not self._estimates:
            return self._loss_scale.scale
        assert self._divisor is not None, "no loss has been met yet"
        return self._loss_scale.scale / self._divisor

    def apply(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss of a micro-batch as the backward pass starts from it."""
        factor = self.now()
        if isinstance(factor, torch.Tensor):
            return loss * factor.float()
        return loss * factor if factor != 1.0 else loss

    def expected(self, targets: int) -> Number:
        """About what the gradient of a sum over a micro-batch's targets will be multiplied with, before it is known.

        Args:
            targets: of the micro-batch on this rank.
        """
        if self._estimates and (self._divisor is None or self._is_mean):
            about = max(targets, 1) * self._micro_batches * self._ranks
            return self._loss_scale.scale / 2.0 ** round(math.log2(about))
        return self.now()

    def learn(self, divisor: torch.Tensor, has_targets: torch.Tensor) -> None:
        """Estimate the next step's divisor by this step's, once this step's factor has been taken out again.

        Args:
            divisor: float scalar, of the step, over all ranks.
            has_targets: bool scalar; False: the step held nothing to train on, and the estimate stays what it is.
        """
        if self._estimates and self._divisor is not None:
            before = torch.as_tensor(self._divisor, dtype=divisor.dtype, device=divisor.device)
            self._divisor = _power_of_two(divisor, has_targets & torch.isfinite(divisor), before)

    def state_dict(self) -> dict[str, Any]:
        """The loss scale's state and, in float16, "divisor": the next step's estimate; waits for the device."""
        state: dict[str, Any] = dict(self._loss_scale.state_dict())
        if self._estimates and self._divisor is not None:
            state["divisor"] = float(self._divisor)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken; an empty mapping changes nothing.

        A loss scale without an estimate is one of older checkpoints, of a loss's sum: it is left alone.
        """
        if self._estimates and state and "divisor" not in state:
            notice("the checkpoint's loss scale was of a sum over the global batch, not of its mean: it begins anew")
            return
        own = {name: value for name, value in state.items() if name != "divisor"}
        self._loss_scale.load_state_dict(own)  # empty of a fixed one: a dynamic one begins anew
        if self._estimates and state:
            self._divisor, self.is_agreed = float(state["divisor"]), True


def _power_of_two(value: torch.Tensor, usable: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
    """The power of two next to `value` where it is `usable`; float scalars and a bool one, on the device."""
    return torch.where(usable, torch.exp2(value.log2().round()), otherwise)
