"""What a run hands on while it trains: a record a logged step, one an evaluation, and the sinks that take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, runtime_checkable

from mindspeed_mm.configs.recipe import DrawnSample, GeneratedFigures


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """The figures of a logged step, and of the interval of steps that ends with it.

    Attributes:
        iteration: number of the step, from 1.
        loss: loss of the step's global batch; NaN without targets.
        grad_norm: norm of the gradient before clipping.
        learning_rate, loss_scale: of the step; a scale of 1 scales nothing.
        consumed_samples, consumed_tokens: since the start of the run, earlier launches included.
        global_batch_size: rows of a step.
        step_ms: time of a step, the mean of the interval, in milliseconds, without evaluations and saves.
        tokens_per_second: over all ranks; None: the data have no tokens.
        media_per_second: kind of media → number a second, over all ranks.
        data_wait_ms: time that a step waits for data, on the rank that waits longest; `data_wait_fraction`: its share.
        padding_fraction: share of positions without a token; None: not known.
        imbalance: the largest cost of a rank over the mean of all; None: not known.
        rows_left_out: rows that could not be used so far.
        tflops_per_device, mfu: model FLOPs a second of a device, in 10^12, and their share of its peak; None: unknown.
        memory_bytes: largest memory of this rank's device so far; None: not known.
        skipped_iterations, nan_iterations, iterations_without_targets: numbers of steps of this launch so far.
        metrics: further figures, which the loss function returned.
        train_iters: steps of the run.
        eta_seconds: time of the steps that are left, at the speed of the interval.
    """

    iteration: int
    loss: float
    grad_norm: float
    learning_rate: float
    loss_scale: float = 1.0
    consumed_samples: int
    consumed_tokens: int = 0
    global_batch_size: int
    step_ms: float
    tokens_per_second: float | None = None
    media_per_second: Mapping[str, float] = field(default_factory=dict)
    data_wait_ms: float | None = None
    data_wait_fraction: float | None = None
    padding_fraction: float | None = None
    imbalance: float | None = None
    rows_left_out: int = 0
    tflops_per_device: float | None = None
    mfu: float | None = None
    memory_bytes: int | None = None
    skipped_iterations: int = 0
    nan_iterations: int = 0
    iterations_without_targets: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    train_iters: int
    eta_seconds: float

    @property
    def line(self) -> dict[str, Any]:
        """The figures by name, as metrics.jsonl has them."""
        return {name: getattr(self, name) for name in _FIGURES} | dict(self.metrics)


#: what metrics.jsonl has of a step, before the further figures
_FIGURES = tuple(f.name for f in fields(StepRecord) if f.name not in ("metrics", "train_iters", "eta_seconds"))


@dataclass(frozen=True)
class EvaluationRecord:
    """An evaluation.

    Attributes:
        iteration: the step after which it was made.
        batches: global batches that were read.
        loss: mean loss over their targets; NaN without targets.
        generated: figures of what the model has generated; None: it has generated nothing.
    """

    iteration: int
    batches: int
    loss: float
    generated: GeneratedFigures | None = None

    @property
    def figures(self) -> dict[str, float]:
        """The figures by name: `eval_loss` and one for each score of what was generated."""
        generated = {} if self.generated is None else self.generated.figures
        return {"eval_loss": self.loss} | {f"eval_{name}": value for name, value in generated.items()}

    @property
    def line(self) -> dict[str, Any]:
        """The evaluation as metrics.jsonl has it."""
        line = {"iteration": self.iteration, "eval_loss": self.loss, "eval_batches": self.batches}
        if self.generated is None:
            return line
        return line | self.figures | {"eval_rows": self.generated.rows}


class Sink(Protocol):
    """Takes the records of a run, on the ranks that write."""

    def step(self, record: StepRecord) -> None:
        """Take a logged step."""

    def evaluation(self, record: EvaluationRecord) -> None:
        """Take an evaluation."""

    def close(self) -> None:
        """Finish, at the end of the run, whatever ends it."""


@runtime_checkable
class SampleSink(Protocol):
    """A sink that takes, beside records, what the model has drawn."""

    def samples(self, iteration: int, samples: Sequence[DrawnSample]) -> None:
        """Take the samples that were drawn after a step."""
