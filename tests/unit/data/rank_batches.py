"""Row indices of one rank, from the plan without packs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mindspeed_mm.data.loading.sampler import PlannedBatches
from mindspeed_mm.data.plan.fixed_plan import FixedPlanner
from mindspeed_mm.data.plan.order import FixedOrder
from mindspeed_mm.data.plan.plan import BatchLayout


class RankBatches:
    """Endless micro-batches of row indices of one data-parallel rank.

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
        layout = BatchLayout(micro_batch_size, global_batch_size, dp_size)
        self._order = FixedOrder(num_rows, shuffle, seed)
        self._planner = FixedPlanner(self._order, layout, drop_last)
        self._planner.go_to({"position": consumed_samples})
        self._batches = PlannedBatches(self._planner, dp_rank)

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
        for batch in self._batches:
            yield [row for ((row, _),) in batch.indices]
