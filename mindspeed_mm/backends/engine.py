"""What a training step is on every backend: sums, norm, clipping, guard, loss scale, schedule, averaged weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from mindspeed_mm import accelerator
from mindspeed_mm.backends.protocol import ForwardStep, StepResult, Value
from mindspeed_mm.backends.sums import ReducedStep, StepReducer, StepSums
from mindspeed_mm.data.counting import BatchCounts
from mindspeed_mm.models.common.modes import evaluation_mode
from mindspeed_mm.optimizer.backward_factor import BackwardFactor
from mindspeed_mm.optimizer.clip import clip_factor
from mindspeed_mm.optimizer.ema import Ema
from mindspeed_mm.optimizer.groups import IsIdle, is_idle
from mindspeed_mm.optimizer.loss_scale import LossScale
from mindspeed_mm.optimizer.schedule import Schedule
from mindspeed_mm.parallel.world import World


class Executor(Protocol):
    """What a backend does of a step in its own way."""

    def run(
        self, forward_step: ForwardStep, data_iterator: Iterator[Any], num_microbatches: int, *, forward_only: bool
    ) -> None:
        """Run forward, and unless `forward_only` backward, of these micro-batches; `StepEngine.add` takes each loss."""

    def local_norm(self) -> torch.Tensor:
        """This rank's part of the squared L2 norm of all gradients: a float scalar on the device."""

    def apply(self, factor: torch.Tensor, finite: torch.Tensor, is_idle: IsIdle) -> None:
        """Step the optimizer with the gradients times `factor`, without waiting for the device.

        Args:
            factor: float scalar on the device.
            finite: bool scalar on the device; False: everything stays as it is.
            is_idle: whether the tower of these modalities had no input: AdamW would decay it though its gradients are
                zero, so it is left alone.
        """

    def settle(self, *, stepped: bool) -> None:
        """Take note of how the last `apply` went, before the next one: a step that was skipped is not counted."""

    def flops(self, counts: BatchCounts) -> float | None:
        """Model FLOPs of what was counted; None: unknown."""

    def gather_objects(self, value: Value) -> list[Value]:
        """What every rank gave, by rank."""


class StepEngine:
    """Training steps and evaluations of a backend.

    The host launches a step without knowing how it will go: whether it is skipped is decided on the device. Its figures
    are read when they are logged, or with the next step. Only a dynamic loss scale waits for them at once, as the next
    backward pass needs its new value.
    """

    def __init__(
        self,
        executor: Executor,
        world: World,
        *,
        modules: Sequence[nn.Module],
        loss_scale: LossScale,
        backward_factor: BackwardFactor,
        schedule: Schedule,
        clip_grad: float,
        ema: Ema | None = None,
    ) -> None:
        """
        Args:
            modules: the model, which an evaluation puts into evaluation mode.
            clip_grad: largest norm of the gradient (0: any).
            ema: averages of the weights, which take in each step.
        """
        self._executor, self._world, self._modules = executor, world, modules
        self._loss_scale, self._backward_factor, self._schedule = loss_scale, backward_factor, schedule
        self._clip_grad, self._ema = clip_grad, ema
        self._reducer = StepReducer(world)
        self._sums = self._new_sums()
        self._pending: LaunchedStep | None = None

    def forward_backward(self, forward_step: ForwardStep, data_iterator: Iterator[Any], num_microbatches: int) -> None:
        """See the protocol of backends."""
        self._backward_factor.begin(num_microbatches)
        self._executor.run(forward_step, data_iterator, num_microbatches, forward_only=False)

    def add(self, output: object, *, forward_only: bool) -> torch.Tensor:
        """Keep a micro-batch's figures, which a `loss_func` returned; returns its loss, with its graph.

        Raises:
            ConfigError: the loss function has returned another form for an earlier micro-batch of the step.
        """
        loss = self._sums.add(output)
        if not forward_only:
            self._backward_factor.meet(self._sums.denominator, is_mean=self._sums.means > 0)
        return loss

    def step(self, counts: BatchCounts, stop_requested: bool) -> LaunchedStep:
        """See the protocol of backends."""
        self.wait()  # for a copy made long ago; the schedule goes on only if the last step was not skipped
        factor = self._backward_factor
        if self._world.dims.pp > 1 and not factor.is_agreed:
            factor.agree(self._executor.gather_objects)
        scale = factor.now()
        squared = self._executor.local_norm()
        counts.cost = self._executor.flops(counts) or counts.tokens
        own = counts if self._world.counts_rows else BatchCounts(wait_seconds=counts.wait_seconds)
        reduced = self._reducer.reduce(self._take_sums(), squared, own, stop_requested)
        norm = reduced.squared_norm.sqrt() / reduced.divisor / scale
        finite = torch.isfinite(norm) & torch.isfinite(reduced.loss) & reduced.has_targets
        pending = LaunchedStep(reduced, norm, self._schedule, self._loss_scale, self._executor)
        self._executor.apply(
            clip_factor(norm, self._clip_grad) / (reduced.divisor * scale),
            finite,
            partial(is_idle, media=reduced.counts.media),
        )
        if self._ema is not None:
            self._ema.update(finite)
        factor.learn(reduced.divisor, reduced.has_targets)
        self._pending = pending
        if self._loss_scale.is_dynamic:
            pending.result()
        return pending

    @torch.no_grad()
    def evaluate(
        self, forward_step: ForwardStep, data_iterator: Iterator[Any], num_microbatches: int
    ) -> tuple[float, float]:
        """See the protocol of backends."""
        with evaluation_mode(self._modules):
            self._executor.run(forward_step, data_iterator, num_microbatches, forward_only=True)
        return self._reducer.reduce_loss(self._take_sums())

    def wait(self) -> None:
        """Wait for the last step's figures, and update the schedule and the loss scale by them."""
        if self._pending is not None:
            self._pending.result()

    def state_dict(self) -> dict[str, Any]:
        """JSON values of schedule and loss scale after the last step; waits for the device."""
        self.wait()
        return {"schedule": self._schedule.state_dict(), "loss_scale": self._backward_factor.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken, with this run's flags."""
        self._schedule.load_state_dict(state["schedule"])
        self._backward_factor.load_state_dict(state.get("loss_scale", {}))

    def _new_sums(self) -> StepSums:
        return StepSums(accelerator.current().sum_dtype, self._world.device)

    def _take_sums(self) -> StepSums:
        """Return what this rank contributes, and start new sums; ranks that compute the same losses contribute once."""
        sums, self._sums = self._sums, self._new_sums()
        return sums if self._world.counts_losses else self._new_sums()


class LaunchedStep:
    """A step whose figures may still be on the device; see PendingStep in the protocol of backends."""

    def __init__(
        self, reduced: ReducedStep, norm: torch.Tensor, schedule: Schedule, loss_scale: LossScale, executor: Executor
    ) -> None:
        """
        Args:
            norm: float scalar on the device, of the step's gradient.
        """
        self.counts, self.stop = reduced.counts, reduced.stop
        self._reduced, self._schedule, self._loss_scale, self._executor = reduced, schedule, loss_scale, executor
        self._read = accelerator.current().read_later(reduced.figures(norm))
        self._result: StepResult | None = None

    def result(self) -> StepResult:
        """Read the figures; the first call also updates the schedule, the loss scale and the backend's step counts."""
        if self._result is None:
            self._result = self._reduced.result(
                self._read(), learning_rate=self._schedule.current_lr, loss_scale=self._loss_scale.scale
            )
            if self._result.skip_reason != "no targets":
                self._loss_scale.update(overflowed=self._result.skipped)
            if not self._result.skipped:
                self._schedule.step()
            self._executor.settle(stepped=not self._result.skipped)
        return self._result
