"""What the loop knows of a backend."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import torch

from mindspeed_mm.checkpoint.snapshot import Snapshot
from mindspeed_mm.configs.recipe import ForwardStep, ModelProvider
from mindspeed_mm.configs.run import Run
from mindspeed_mm.data.counting import BatchCounts
from mindspeed_mm.parallel.world import World

Value = TypeVar("Value")

SkipReason = Literal["", "not finite", "no targets"]
"""Why a step changed nothing: its loss or gradient was not finite; its global batch held nothing to train on; "": it
did change something."""


@dataclass
class StepResult:
    """What a training step did.

    Attributes:
        loss: of the step, as the loss type defines it; global. Not a number where there were no targets.
        grad_norm: L2 norm of the gradient of exactly that loss, before clipping. Not a number without targets either.
        skip_reason: why weights, optimizer state, schedule and averages were left as they are; "": they were not.
        learning_rate: that the step used.
        loss_scale: that the step used (1: none).
        metrics: further figures that the loss function returned, global means.
    """

    loss: float
    grad_norm: float
    skip_reason: SkipReason
    learning_rate: float
    loss_scale: float = 1.0
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def skipped(self) -> bool:
        """Whether the step changed nothing."""
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
        """The result of a step, from its figures.

        Args:
            has_targets: whether its global batch held anything to train on.
        """
        if not has_targets:
            return cls(float("nan"), float("nan"), "no targets", learning_rate, loss_scale, metrics)
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        return cls(loss, grad_norm, "" if finite else "not finite", learning_rate, loss_scale, metrics)


class PendingStep(Protocol):
    """A step that has been launched; its figures may still be on the device.

    Attributes:
        counts: global, known on the host at once.
        stop: whether any rank was asked to stop.
    """

    counts: BatchCounts
    stop: bool

    def result(self) -> StepResult:
        """Wait for the step's figures (a host sync: on logging steps only)."""


class Backend(Protocol):
    """PTD and FSDP2 implement this; the loop knows nothing else of them.

    Attributes:
        world: this process and its rank sets, after `setup`.
        compute_dtype: fp32, bf16 or fp16.
    """

    world: World
    compute_dtype: str

    def setup(self, run: Run) -> None:
        """Start process groups and device meshes."""

    def build_model(self, model_provider: ModelProvider, *, load_weights: bool) -> Any:
        """Return the wrapped model, weights loaded (unless a checkpoint will bring them), frozen parts frozen."""

    def build_optimizer(self, model: Any, run: Run) -> Any:
        """Return the optimizer; its schedule is `backend.schedule`.

        Args:
            run: the description, with the length of the run known.
        """

    def forward_backward(self, forward_step: ForwardStep, data_iterator: Iterator[Any], num_microbatches: int) -> None:
        """Run a step's micro-batches; sums of losses and counts are kept, gradients are left in place."""

    def step(self, counts: BatchCounts, stop_requested: bool) -> PendingStep:
        """Reduce the sums once, normalise, clip, guard against non-finite values, step optimizer and schedule.

        Args:
            counts: what this rank's micro-batches held.
            stop_requested: whether this rank was asked to stop; all ranks learn of it in the same reduction.
        """

    def evaluate(
        self, forward_step: ForwardStep, data_iterator: Iterator[Any], num_microbatches: int
    ) -> tuple[float, float]:
        """Forward only; returns (loss sum, denominator), global."""

    def flops(self, counts: BatchCounts) -> float | None:
        """Model FLOPs of what was counted (forward and backward, useful work only); None: unknown."""

    def gather_objects(self, value: Value) -> list[Value]:
        """What every rank gave, by rank (at start and end, never in a step)."""

    def barrier(self) -> None:
        """Wait for all ranks (at start and end, never in a step)."""

    def snapshot(self, extra: dict[str, Any], *, detached: bool) -> Snapshot:
        """Take hold of model, optimizer, schedule, loss scale and random states as they are after the last step.

        What it returns is written by `CheckpointSaver`, on this thread or on another one, all ranks together. Taking it
        must not wait for other ranks: one of them may fail here, for want of host memory.

        Args:
            extra: JSON values that `load` will return.
            detached: the snapshot must stay as it is while training goes on, until the next detached one is taken: copy
                what a step changes. False: training waits until it is written, and tensors need no copy.
        """

    def load(self, directory: Any, *, optimizer: bool, rng: bool, schedule: bool) -> dict[str, Any]:
        """Read what a snapshot wrote, all of it or only weights and what is asked for; returns `extra`."""

    def load_weights(self, directory: Any) -> None:
        """Fill the model's weights, and nothing else, from a HF directory or any checkpoint folder."""

    def export_hf(self, directory: Path, *, is_final: bool = True) -> None:
        """Write the weights in the hub's layout.

        Args:
            is_final: what the run ends with: of a model that is a pipeline's part, the whole pipeline.
        """


def normalise_loss_output(output: object) -> tuple[torch.Tensor, torch.Tensor | None, dict[str, Any]]:
    """Bring what a `loss_func` returned into one form.

    Accepted: a bare tensor; (loss, metrics); (loss_sum, num_tokens, metrics). A metric is a number, averaged over
    micro-batches and ranks, or a pair (sum, denominator), summed over them and then divided. Beside a mean a metric
    `loss` that is a pair says what it is the mean of; a step whose denominators are all 0 has no targets.

    Returns:
        (loss, denominator, metrics): the denominator is None for a mean, which is averaged over micro-batches and
        ranks.
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
