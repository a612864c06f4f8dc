"""The factor on a loss before its backward pass in float16: the loss scale divided by an estimate of N.

A step's loss is a sum over the global batch divided by N, which is known only after all micro-batches: gradients are
divided afterwards. In float16 they could overflow before, the more likely the larger the batch. So the factor includes
an estimate of 1/N, and gradients are those of `loss scale * mean loss`, as in Megatron, up to a factor of the square
root of 2. The estimate is a power of two, so that dividing by the factor afterwards is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from mindspeed_mm.optimizer.loss_scale import LossScale
from mindspeed_mm.parallel.world import RankSet
from mindspeed_mm.utils.log import notice

Number: TypeAlias = float | torch.Tensor
"""A number on the host, or a float scalar on the device."""


class BackwardFactor:
    """The loss scale divided by an estimate of the step's divisor; the same on all ranks in a step.

    The estimate is the last step's divisor, rounded to a power of two. In the first step it is the sum over ranks of
    the first micro-batch's denominator, times the number of micro-batches, rounded likewise; for mean losses the
    divisor is known from the start.

    Attributes:
        is_agreed: whether all ranks know the estimate; False until a run's first step.
    """

    def __init__(self, loss_scale: LossScale, *, estimates: bool, ranks: RankSet | None = None) -> None:
        """
        Args:
            loss_scale: loss scale of the run.
            estimates: whether the run computes in float16; False: the factor is the loss scale alone.
            ranks: the ranks that add losses of different tokens; None: this process alone.
        """
        self._loss_scale, self._estimates = loss_scale, estimates
        self._ranks = 1 if ranks is None else ranks.size
        self._group = None if ranks is None else ranks.group
        self._divisor: Number | None = None
        self._micro_batches = 1
        self._is_mean = False
        self.is_agreed = not estimates

    def begin(self, micro_batches: int) -> None:
        """Begin a step with this number of micro-batches on each rank."""
        self._micro_batches = micro_batches

    def observe(self, denominator: torch.Tensor, *, is_mean: bool) -> None:
        """Record the denominator of a micro-batch's loss, before its backward pass.

        In a run's first step this is a collective of the ranks that have a loss: they sum their estimates.

        Args:
            denominator: float scalar: sum over the micro-batches of the step so far, on this rank.
            is_mean: the loss is a mean, averaged over micro-batches and ranks; False: a sum with a denominator.
        """
        self._is_mean = is_mean
        if self._estimates and self._divisor is None:
            total = torch.ones_like(denominator) if is_mean else denominator.clone()
            if self._ranks > 1:
                dist.all_reduce(total, group=self._group)
            self._divisor = _power_of_two(total * self._micro_batches, total > 0, torch.ones_like(total))

    def agree(self, gather: Callable[[float | None], list[float | None]]) -> None:
        """Send the first step's estimate to the ranks without a loss; a collective.

        Args:
            gather: returns the values of all ranks, ordered by rank.
        """
        own = None if self._divisor is None else float(self._divisor)
        self._divisor = max(value for value in gather(own) if value is not None)
        self.is_agreed = True

    def current(self) -> Number:
        """Return the factor of this step; in a run's first step available after the first `observe`."""
        if not self._estimates:
            return self._loss_scale.scale
        assert self._divisor is not None, "no loss has been observed yet"
        return self._loss_scale.scale / self._divisor

    def apply(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss of a micro-batch times the factor, for its backward pass."""
        factor = self.current()
        if isinstance(factor, torch.Tensor):
            return loss * factor.float()
        return loss * factor if factor != 1.0 else loss

    def expected(self, targets: int) -> Number:
        """Return an estimate of the factor on a sum over a micro-batch's targets, before the loss is known.

        Args:
            targets: number of targets of the micro-batch on this rank.
        """
        if self._estimates and (self._divisor is None or self._is_mean):
            about = max(targets, 1) * self._micro_batches * self._ranks
            return self._loss_scale.scale / 2.0 ** round(math.log2(about))
        return self.current()

    def update(self, divisor: torch.Tensor, has_targets: torch.Tensor) -> None:
        """Estimate the next step's divisor from this step's, after the gradients have been divided by this factor.

        Args:
            divisor: float scalar: divisor of the step over all ranks.
            has_targets: bool scalar; False: the step had no targets, and the estimate stays unchanged.
        """
        if self._estimates and self._divisor is not None:
            before = self._divisor
            if not isinstance(before, torch.Tensor):
                before = torch.full_like(divisor, before)
            self._divisor = _power_of_two(divisor, has_targets & torch.isfinite(divisor), before)

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scale's state and, in float16, the estimate as "divisor"; waits for the device."""
        state: dict[str, Any] = dict(self._loss_scale.state_dict())
        if self._estimates and self._divisor is not None:
            state["divisor"] = float(self._divisor)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned; an empty mapping changes nothing.

        Older checkpoints have a loss scale without an estimate, which applies to the sum of a loss: it is ignored.
        """
        if self._estimates and state and "divisor" not in state:
            notice("the checkpoint's loss scale was of a sum over the global batch, not of its mean: it begins anew")
            return
        own = {name: value for name, value in state.items() if name != "divisor"}
        self._loss_scale.load_state_dict(own)  # empty if the checkpoint's scale was fixed: a dynamic one starts anew
        if self._estimates and state:
            self._divisor, self.is_agreed = float(state["divisor"]), True


def _power_of_two(value: torch.Tensor, usable: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
    """Return `value` rounded to a power of two if `usable` is True, else `otherwise`; scalars on the device."""
    return torch.where(usable, torch.exp2(value.log2().round()), otherwise)
