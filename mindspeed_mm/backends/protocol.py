"""The interface between the training loop and a backend."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import torch

from mindspeed_mm.checkpoint.snapshot import Snapshot
from mindspeed_mm.configs.recipe import ForwardStep, ModelProvider, Preparation
from mindspeed_mm.configs.run import Run
from mindspeed_mm.data.loading.counting import BatchCounts
from mindspeed_mm.models.contract import ModelOutline
from mindspeed_mm.parallel.world import World

Value = TypeVar("Value")

SkipReason = Literal["", "not finite", "no targets"]
"""Why a step was skipped: "not finite": its loss or gradient; "no targets": its global batch had no targets; "": the
step was not skipped."""


@dataclass
class StepResult:
    """Result of a training step.

    Attributes:
        loss: loss of the global batch, as the loss type defines it. NaN if there were no targets.
        grad_norm: L2 norm of the gradient of this loss, before clipping. NaN if there were no targets.
        skip_reason: why weights, optimizer state, schedule and averages are unchanged; "": the step was not skipped.
        learning_rate: learning rate of this step.
        loss_scale: loss scale of this step; 1: the loss was not scaled.
        metrics: global means of the further metrics that the loss function returned.
        expert_shares: () → layer → share of its tokens that each expert got (a host sync: on logging steps only); {}:
            there are no experts.
    """

    loss: float
    grad_norm: float
    skip_reason: SkipReason
    learning_rate: float
    loss_scale: float = 1.0
    metrics: dict[str, float] = field(default_factory=dict)
    expert_shares: Callable[[], dict[str, list[float]]] = dict

    @property
    def skipped(self) -> bool:
        """Whether the step left weights and optimizer state unchanged."""
        return self.skip_reason != ""

    @classmethod
    def of(
        cls,
        loss: float,
        grad_norm: float,
        *,
        has_targets: bool,
        learning_rate: float,
        loss_scale: float,
        metrics: dict[str, float],
    ) -> StepResult:
        """Return the result of a step with the right `skip_reason`.

        Args:
            has_targets: whether the global batch had any targets.
        """
        if not has_targets:
            return cls(float("nan"), float("nan"), "no targets", learning_rate, loss_scale, metrics)
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        return cls(loss, grad_norm, "" if finite else "not finite", learning_rate, loss_scale, metrics)


@dataclass(frozen=True)
class Generation:
    """The trained model as its own library generates with it.

    Attributes:
        model: in evaluation mode, with the last step's weights; None: this rank generates nothing.
        rank, size: place among the ranks that share what is generated, and their number. Ranks with the same `rank`
            generate the same.
        in_lockstep: whether parameters are sharded over the ranks, so that all of them must call the model equally
            often.
        built: what the model's provider returned, of which `model` is the part that is trained; None: it isn't here.
    """

    model: Any
    rank: int
    size: int
    in_lockstep: bool
    built: Any = None


class PendingStep(Protocol):
    """A step that has been launched; its loss and gradient norm may still be on the device.

    Attributes:
        counts: counts of the global batch, available on the host.
        stop: whether any rank requested a stop.
        log: whether any rank requested that the step is logged.
    """

    counts: BatchCounts
    stop: bool
    log: bool

    def result(self) -> StepResult:
        """Wait for the step's loss, gradient norm and metrics (a host sync: on logging steps only)."""


class Backend(Protocol):
    """Interface of the PTD and FSDP2 backends; the training loop uses nothing else of them.

    Attributes:
        world: this process and its rank sets; set by `setup`.
        compute_dtype: "fp32", "bf16" or "fp16".
        outline: the whole model in a few words, once it is built; None: this rank doesn't know all of it.
    """

    world: World
    compute_dtype: str
    outline: ModelOutline | None

    def setup(self, run: Run) -> None:
        """Start process groups and device meshes."""

    def build_model(self, model_provider: ModelProvider, *, load_weights: bool, base: str | None = None) -> Any:
        """Return the wrapped model with frozen parts frozen.

        Args:
            load_weights: load pretrained weights; False if a checkpoint will be loaded afterwards.
            base: the folder that they are loaded from; None: the one that the model names.
        """

    def preparation(self, model_provider: ModelProvider) -> Preparation | None:
        """Return what prepares micro-batches for a model, before it is built: `prepare` of one without weights.

        None: the model has none.
        """

    def build_optimizer(self, model: Any, run: Run) -> Any:
        """Return the optimizer; its schedule is `backend.schedule`.

        Args:
            run: settings of the run, with its length resolved.
        """

    def forward_backward(self, forward_step: ForwardStep, data_iterator: Iterator[Any], num_microbatches: int) -> None:
        """Run forward and backward of a step's micro-batches; accumulates gradients and sums of losses."""

    def step(self, counts: BatchCounts, stop_requested: bool, log_requested: bool = False) -> PendingStep:
        """Reduce the sums once, normalise, clip, guard against non-finite values, step optimizer and schedule.

        Args:
            counts: counts of this rank's micro-batches.
            stop_requested: whether this rank requests a stop; the same reduction shares it with all ranks.
            log_requested: whether this rank requests that the step is logged; shared likewise.
        """

    def evaluate(
        self, forward_step: ForwardStep, data_iterator: Iterator[Any], num_microbatches: int
    ) -> tuple[float, float]:
        """Run the forward pass of micro-batches; returns (loss sum, denominator) over all ranks."""

    def generation(self, *, averaged: bool = False) -> AbstractContextManager[Generation]:
        """Return a context with the model for generation; a collective at both ends.

        Args:
            averaged: with the averaged weights, if the run keeps any.

        Afterwards the state of model, hooks and random generators is that of before, so that the steps that follow are
        those that would have followed without it.
        """

    def gather_objects(self, value: Value) -> list[Value]:
        """Return the values of all ranks, ordered by rank (at start and end, never in a step)."""

    def barrier(self) -> None:
        """Wait for all ranks (at start and end, never in a step)."""

    def snapshot(self, extra: dict[str, Any], *, detached: bool) -> Snapshot:
        """Return a snapshot of model, optimizer, schedule, loss scale and random states after the last step.

        `CheckpointSaver` writes the snapshot, on this thread or on another one, on all ranks together. Taking the
        snapshot must not wait for other ranks, as one of them may fail here, for example for lack of host memory.

        Args:
            extra: JSON values that `load` will return.
            detached: copy every tensor that a step changes, so that training may continue while the snapshot is
                written; the copies stay valid until the next detached snapshot. False: training waits until the
                snapshot is written, and tensors are not copied.
        """

    def load(self, directory: Any, *, optimizer: bool, rng: bool, schedule: bool) -> dict[str, Any]:
        """Load a checkpoint: the weights, and the state of the parts that are set to True; returns `extra`."""

    def load_weights(self, directory: Any) -> None:
        """Load the model's weights, and nothing else, from a HF directory or any checkpoint folder."""

    def export_hf(self, directory: Path, *, is_final: bool = True) -> None:
        """Write the weights in the hub's layout.

        Args:
            is_final: the export at the end of the run: for a component of a diffusers pipeline, the whole pipeline is
                written.
        """


def normalise_loss_output(output: object) -> tuple[torch.Tensor, torch.Tensor | None, dict[str, Any]]:
    """Convert the return value of a `loss_func` to (loss, denominator, metrics).

    Accepted: a bare tensor; (loss, metrics); (loss_sum, num_tokens, metrics). A metric is a number, averaged over
    micro-batches and ranks, or a pair (sum, denominator), summed over them and then divided. With a mean loss, a metric
    `loss` that is a pair gives the number of targets of the mean; a step whose denominators are all 0 has no targets.

    Returns:
        (loss, denominator, metrics): the denominator is None for a mean loss, which is averaged over micro-batches and
        ranks.

    Raises:
        TypeError: `output` has none of these forms.
    """
    if isinstance(output, torch.Tensor):
        return output, None, {}
    if isinstance(output, tuple) and len(output) == 2 and isinstance(output[1], dict):
        return output[0], None, output[1]
    if isinstance(output, tuple) and len(output) == 3 and isinstance(output[2], dict):
        denominator = output[1]
        if not isinstance(denominator, torch.Tensor):
            denominator = torch.tensor(float(denominator))
        return output[0], denominator, output[2]
    raise TypeError(
        f"loss_func returned {type(output).__name__}; expected a tensor, (loss, dict) or (loss_sum, num_tokens, dict)"
    )
