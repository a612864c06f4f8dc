"""The training step that all backends share: sums, norm, clipping, skipping, loss scale, schedule, averaged weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from mindspeed_mm import accelerator
from mindspeed_mm.backends.protocol import ForwardStep, StepResult, Value
from mindspeed_mm.backends.sums import ReducedStep, StepReducer, StepSums
from mindspeed_mm.data.loading.counting import BatchCounts
from mindspeed_mm.models.common.modes import evaluation_mode
from mindspeed_mm.optimizer.backward_factor import BackwardFactor
from mindspeed_mm.optimizer.clip import clip_factor
from mindspeed_mm.optimizer.ema import Ema
from mindspeed_mm.optimizer.groups import IsIdle, is_idle
from mindspeed_mm.optimizer.loss_scale import LossScale
from mindspeed_mm.optimizer.schedule import Schedule
from mindspeed_mm.parallel.world import World


class Executor(Protocol):
    """The parts of a step that each backend implements itself."""

    def run(
        self, forward_step: ForwardStep, data_iterator: Iterator[Any], num_microbatches: int, *, forward_only: bool
    ) -> None:
        """Run forward, and unless `forward_only` backward, of micro-batches; passes each loss to `StepEngine.add`."""

    def local_norm(self) -> torch.Tensor:
        """Return this rank's part of the squared L2 norm of all gradients: a float scalar on the device."""

    def apply(self, factor: torch.Tensor, finite: torch.Tensor, is_idle: IsIdle) -> None:
        """Step the optimizer with the gradients times `factor`, without waiting for the device.

        Args:
            factor: float scalar on the device.
            finite: bool scalar on the device; False: parameters and optimizer state stay unchanged.
            is_idle: whether the tower of these modalities had no input. Its parameters are not stepped, as AdamW would
                decay them although their gradients are zero.
        """

    def finish_step(self, *, stepped: bool) -> None:
        """Record the outcome of the last `apply` before the next one: a skipped step is not counted."""

    def flops(self, counts: BatchCounts) -> float | None:
        """Return the model FLOPs of this rank's counts (forward and backward, no recompute); None: unknown."""

    def gather_objects(self, value: Value) -> list[Value]:
        """Return the values of all ranks, ordered by rank."""


class StepEngine:
    """Training steps and evaluations of a backend.

    The host launches a step without waiting for its outcome: the device decides whether the step is skipped. The host
    reads the step's loss and norm when they are logged, or with the next step. Only a dynamic loss scale reads them at
    once, as the next backward pass needs the updated scale.
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
        compiles: bool = False,
    ) -> None:
        """
        Args:
            modules: the model; `evaluate` puts it into evaluation mode.
            clip_grad: maximum norm of the gradient; 0: no clipping.
            ema: averages of the weights, updated after each step.
            compiles: kernels are compiled for this machine.
        """
        self._executor, self._world, self._modules = executor, world, modules
        self._loss_scale, self._backward_factor, self._schedule = loss_scale, backward_factor, schedule
        self._clip_grad, self._ema = clip_grad, ema
        self._reducer = StepReducer(world)
        accelerator.current().prepare_steps(modules, compiles=compiles)
        self._sums = self._new_sums()
        self._pending: LaunchedStep | None = None

    def forward_backward(self, forward_step: ForwardStep, data_iterator: Iterator[Any], num_microbatches: int) -> None:
        """See the protocol of backends."""
        self._backward_factor.begin(num_microbatches)
        self._executor.run(forward_step, data_iterator, num_microbatches, forward_only=False)

    def add(self, output: object, *, forward_only: bool) -> torch.Tensor:
        """Add the return value of a micro-batch's `loss_func` to the step's sums.

        Returns:
            the micro-batch's loss, with its autograd graph.

        Raises:
            ConfigError: the loss function returned another form for an earlier micro-batch of the step.
        """
        loss = self._sums.add(output)
        if not forward_only:
            self._backward_factor.observe(self._sums.denominator, is_mean=self._sums.means > 0)
        return loss

    def step(self, counts: BatchCounts, stop_requested: bool, log_requested: bool = False) -> LaunchedStep:
        """See the protocol of backends."""
        self.wait()  # the last step's result was copied to the host long ago; the schedule advances if it was applied
        factor = self._backward_factor
        if self._world.dims.pp > 1 and not factor.is_agreed:
            factor.agree(self._executor.gather_objects)
        scale = factor.current()
        squared = self._executor.local_norm()
        counts.flops = self._executor.flops(counts)
        own = counts
        if not self._world.counts_rows:
            own = BatchCounts(wait_seconds=counts.wait_seconds, memory_bytes=counts.memory_bytes)
            own.flops = None if counts.flops is None else 0.0
        reduced = self._reducer.reduce(self._take_sums(), squared, own, (stop_requested, log_requested))
        reduced.counts.row_ids, reduced.counts.lengths = counts.row_ids, counts.row_lengths
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
        factor.update(reduced.divisor, reduced.has_targets)
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
        """Wait for the last step's result and update schedule and loss scale with it."""
        if self._pending is not None:
            self._pending.result()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of schedule and loss scale after the last step as JSON values; waits for the device."""
        self.wait()
        return {"schedule": self._schedule.state_dict(), "loss_scale": self._backward_factor.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned; the flags are those of this run."""
        self._schedule.load_state_dict(state["schedule"])
        self._backward_factor.load_state_dict(state.get("loss_scale", {}))

    def _new_sums(self) -> StepSums:
        return StepSums(accelerator.current().sum_dtype, self._world.device)

    def _take_sums(self) -> StepSums:
        """Return this rank's sums and reset them; zeros if another rank of the same losses contributes them."""
        sums, self._sums = self._sums, self._new_sums()
        return sums if self._world.counts_losses else self._new_sums()


class LaunchedStep:
    """A step whose results may still be on the device; see PendingStep in the protocol of backends."""

    def __init__(
        self, reduced: ReducedStep, norm: torch.Tensor, schedule: Schedule, loss_scale: LossScale, executor: Executor
    ) -> None:
        """
        Args:
            norm: norm of the step's gradient, a float scalar on the device.
        """
        self.counts, self.stop, self.log = reduced.counts, reduced.stop, reduced.log
        self._reduced, self._schedule, self._loss_scale, self._executor = reduced, schedule, loss_scale, executor
        self._read = accelerator.current().read_later(reduced.figures(norm))
        self._result: StepResult | None = None

    def result(self) -> StepResult:
        """Return the step's result; the first call also updates schedule, loss scale and backend with its outcome."""
        if self._result is None:
            self._result = self._reduced.result(
                self._read(), learning_rate=self._schedule.current_lr, loss_scale=self._loss_scale.scale
            )
            if self._reduced.load is not None:
                self._result.expert_shares = self._reduced.load.shares
            if self._result.skip_reason != "no targets":
                self._loss_scale.update(overflowed=self._result.skipped)
            if not self._result.skipped:
                self._schedule.step()
            self._executor.finish_step(stepped=not self._result.skipped)
        return self._result
