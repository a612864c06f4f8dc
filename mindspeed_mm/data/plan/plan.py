"""The plan of a run: the samples of each global batch, and their ranks and micro-batches.

Every rank computes the same plan from the same order and the same sizes. The state of a plan is plain numbers that
don't depend on ranks, workers or micro-batches.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mindspeed_mm.data.plan.measuring import Measurer
from mindspeed_mm.data.plan.order import Order
from mindspeed_mm.utils.errors import ConfigError

FILLER = -1

#: a sample: row of the data set (-1: a filler), and its piece where a row gives several, or its bucket; and its epoch,
#: where the data set names epochs
PlannedSample = tuple[int, ...]
#: a row of a micro-batch: one sample, or the samples of a pack
PlannedRow = list[PlannedSample]


@dataclass(frozen=True)
class BatchLayout:
    """Sizes of a batch.

    Attributes:
        micro_batch_size: rows of a micro-batch of one rank.
        global_batch_size: rows of an optimizer step over all ranks.
        dp_size: data-parallel ranks.

    Raises:
        ConfigError: The sizes don't divide.
    """

    micro_batch_size: int
    global_batch_size: int
    dp_size: int = 1

    def __post_init__(self) -> None:
        if (
            self.micro_batch_size < 1
            or self.global_batch_size < 1
            or self.global_batch_size % (self.micro_batch_size * self.dp_size)
        ):
            raise ConfigError(
                f"--global-batch-size {self.global_batch_size} is not a multiple of --micro-batch-size "
                f"{self.micro_batch_size} × {self.dp_size} data-parallel rank(s)"
            )

    @property
    def micro_batches(self) -> int:
        """Micro-batches that each rank takes for an optimizer step."""
        return self.global_batch_size // (self.micro_batch_size * self.dp_size)

    def in_order(self) -> list[list[list[int]]]:
        """[rank][micro-batch] → places in the global batch: micro-batch m of rank r begins at (m·ranks + r)·size."""
        size = self.micro_batch_size
        return [
            [
                list(range((batch * self.dp_size + rank) * size, (batch * self.dp_size + rank + 1) * size))
                for batch in range(self.micro_batches)
            ]
            for rank in range(self.dp_size)
        ]


@dataclass(frozen=True)
class GlobalBatch:
    """The rows of one optimizer step.

    Attributes:
        micro_batches: [rank][micro-batch][row] → the row's samples.
        state: state of the plan after this batch.
        left_out: (row, reason) of the rows without a sample that were found while this batch was planned.
    """

    micro_batches: Sequence[Sequence[Sequence[PlannedRow]]]
    state: Mapping[str, Any]
    left_out: Sequence[tuple[int, str]] = ()

    @property
    def rows(self) -> list[PlannedRow]:
        """All rows, rank after rank."""
        return [row for rank in self.micro_batches for batch in rank for row in batch]


class Planner(Protocol):
    """Makes global batches from a position on."""

    layout: BatchLayout
    order: Order

    @property
    def measurer(self) -> Measurer | None:
        """Measures the rows; None: nothing is measured."""

    @property
    def samples_per_epoch(self) -> int | None:
        """Rows by which an epoch advances `consumed_samples`, fillers included; None where it isn't known."""

    def batches(self) -> Generator[GlobalBatch, None, None]:
        """Yield global batches from the present state on, without end."""

    def rows_to_measure(self) -> Iterator[int]:
        """Yield the rows whose sizes `batches` asks for, from the present state on, without end."""

    def state(self) -> Mapping[str, Any]:
        """The present state."""

    def go_to(self, state: Mapping[str, Any]) -> None:
        """Take a state of `state()` or a `GlobalBatch`, of this planner or of the other kind."""
