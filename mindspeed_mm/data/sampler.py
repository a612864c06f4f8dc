"""What one rank takes of the plan, as samplers for torch's DataLoader."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mindspeed_mm.data.fixed_plan import FixedPlanner
from mindspeed_mm.data.order import FixedOrder
from mindspeed_mm.data.plan import FILLER, Layout, PlannedRow, Planner
from mindspeed_mm.utils.errors import ConfigError

__all__ = ["FILLER", "GlobalOrderBatchSampler", "PlannedBatches"]


def check_rank(dp_rank: int, dp_size: int) -> None:
    """Raise ConfigError if there is no such data-parallel rank."""
    if not 0 <= dp_rank < dp_size:
        raise ConfigError(f"data-parallel rank {dp_rank} of {dp_size} ranks: expected 0 to {dp_size - 1}")


class PlannedBatches:
    """Endless micro-batches of one rank, read ahead of what has been trained on.

    Args:
        planner: The plan.
        dp_rank: This data-parallel rank.
    """

    def __init__(self, planner: Planner, dp_rank: int = 0) -> None:
        check_rank(dp_rank, planner.layout.dp_size)
        self.planner = planner
        self.dp_rank = dp_rank
        self._state = planner.state()
        self._ahead: deque[tuple[Mapping[str, Any], Sequence[tuple[int, str]]]] = deque()
        self._running: Any = None

    @property
    def state(self) -> Mapping[str, Any]:
        """State of the plan after the global batches that were finished, whatever has been read ahead."""
        return self._state

    def go_to(self, state: Mapping[str, Any]) -> None:
        """Take a state; the next `iter()` begins there."""
        self.close()
        self.planner.go_to(state)
        self._state = self.planner.state()

    def finish_batch(self) -> Sequence[tuple[int, str]]:
        """Say that a global batch was handed out whole; returns what its plan has left out."""
        self._state, left_out = self._ahead.popleft()
        return left_out

    def __iter__(self) -> Iterator[list[PlannedRow]]:
        """Yield this rank's micro-batches, from the state on."""
        self.go_to(self._state)
        self._running = self.planner.batches()
        for batch in self._running:
            self._ahead.append((batch.state, batch.left_out))
            yield from batch.micro_batches[self.dp_rank]

    def close(self) -> None:
        """Stop the plan, and the workers that measure for it; what was read ahead is forgotten."""
        running, self._running = self._running, None
        self._ahead.clear()
        if running is not None:
            running.close()


class GlobalOrderBatchSampler:
    """Endless micro-batches of row indices of one data-parallel rank, for a data set of the user's own.

    Args:
        num_rows: Rows of the data set.
        micro_batch_size: Rows of a micro-batch of one rank.
        global_batch_size: Rows of an optimizer step over all ranks.
        dp_rank: This data-parallel rank.
        dp_size: Number of data-parallel ranks.
        shuffle: A new order every epoch; else file order.
        seed: Decides the orders.
        drop_last: As in `FixedPlanner`.
        consumed_samples: Position to begin at, fillers counted.

    Raises:
        ConfigError: The batch sizes don't divide.
        DataError: `drop_last` and fewer rows than one global batch.
    """

    def __init__(
        self,
        num_rows: int,
        micro_batch_size: int,
        global_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        shuffle: bool = True,
        seed: int = 1234,
        drop_last: bool = True,
        consumed_samples: int = 0,
    ) -> None:
        check_rank(dp_rank, dp_size)
        layout = Layout(micro_batch_size, global_batch_size, dp_size)
        self._order = FixedOrder(num_rows, shuffle, seed)
        self._planner = FixedPlanner(self._order, layout, drop_last)
        self._planner.go_to({"position": consumed_samples})
        self.num_rows = num_rows
        self.dp_rank = dp_rank
        self.consumed_samples = consumed_samples

    @property
    def global_batches_per_epoch(self) -> int:
        """Optimizer steps in an epoch."""
        batches = self._planner.batches_per_epoch
        assert batches is not None
        return batches

    @property
    def samples_per_epoch(self) -> int:
        """Samples that an epoch advances the position by, fillers counted."""
        return self.global_batches_per_epoch * self._planner.layout.global_batch_size

    @property
    def micro_batches_per_global_batch(self) -> int:
        """Micro-batches that each rank takes for an optimizer step."""
        return self._planner.layout.micro_batches

    def order(self, epoch: int) -> np.ndarray:
        """Return the rows of an epoch in order, [num_rows] int64, the same on every rank."""
        return self._order.rows_of(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the row indices of this rank's micro-batches, without end."""
        self._planner.go_to({"position": self.consumed_samples})
        for batch in self._planner.batches():
            for rows in batch.micro_batches[self.dp_rank]:
                yield [row for ((row, _),) in rows]
