"""The plan without packs: every row of a batch is one row of the data, and an epoch ends with a global batch."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from mindspeed_mm.data.media.media import SampleSize
from mindspeed_mm.data.plan.balance import balance_micro_batches, balance_ranks
from mindspeed_mm.data.plan.cost import CostModel
from mindspeed_mm.data.plan.grouping import Grouping
from mindspeed_mm.data.plan.measuring import Measurer
from mindspeed_mm.data.plan.order import Order
from mindspeed_mm.data.plan.plan import FILLER, BatchLayout, GlobalBatch
from mindspeed_mm.utils.errors import DataError

_Sizes = list[list[SampleSize]]

_NOTHING = [SampleSize(0)]


@dataclass(frozen=True)
class Balance:
    """The balance of costs within a global batch.

    Attributes:
        ranks: rows are moved between ranks (and micro-batches).
        micro_batches: the rows of each rank are moved between its micro-batches.
    """

    ranks: bool = False
    micro_batches: bool = False

    def __bool__(self) -> bool:
        return self.ranks or self.micro_batches


@dataclass(frozen=True)
class _Batch:
    """Rows of a global batch, before they have ranks: `number` counts from 0 within `epoch`."""

    epoch: int
    number: int
    rows: list[int]
    bucket: int = 0


class FixedPlanner:
    """Global batches of a fixed number of rows.

    Every epoch of the order is cut into global batches; so their sequence depends only on the seed and their
    size. The position in it is a number of rows; the last incomplete batch counts as a whole one. A position inside a
    global batch comes from a run with another global batch size; the next whole one follows.

    A sample is (row, bucket): all of a global batch name the same bucket, 0 where there are none.
    Without `grouping` and `balance` nothing is measured, and micro-batch m of rank r takes the rows
    `m * micro_batch_size * dp_size + r * micro_batch_size` onwards of a global batch.

    Args:
        order: The order of rows.
        layout: Sizes of a batch.
        drop_last: Leave out the rows at an epoch's end that don't fill a global batch; else the last global batch is
            filled up with index -1 (never with rows of the next epoch), so that every rank has its usual number of
            micro-batches.
        measurer: Finds sizes; needed for grouping and balance.
        grouping: Puts rows of like size together, or spreads them.
        balance: What is balanced within a global batch.
        costs: The measure of balance.
        names_epochs: Samples have their epoch: (row, bucket, epoch) in place of (row, bucket).

    Raises:
        DataError: `drop_last` and fewer rows than one global batch.
    """

    def __init__(
        self,
        order: Order,
        layout: BatchLayout,
        drop_last: bool = True,
        measurer: Measurer | None = None,
        grouping: Grouping | None = None,
        balance: Balance | None = None,
        costs: CostModel | None = None,
        names_epochs: bool = False,
    ) -> None:
        self.order = order
        self.layout = layout
        self.drop_last = drop_last
        self.measurer = measurer if grouping or balance else None
        self._grouping = grouping
        self._balance = balance or Balance()
        self._costs = costs or CostModel()
        self._names_epochs = names_epochs
        self._position = 0
        self._check(order.num_rows)

    def _check(self, num_rows: int | None) -> None:
        size = self.layout.global_batch_size
        if self.drop_last and num_rows is not None and num_rows < size:
            raise DataError(
                f"the data set has {num_rows} row(s), fewer than one global batch of {size}, and "
                "drop_last leaves out what doesn't fill one, so that no step could be made; use a --global-batch-size "
                f"of at most {num_rows}, or set dataloader_param.drop_last to false"
            )

    @property
    def batches_per_epoch(self) -> int | None:
        """Optimizer steps in an epoch; None as long as the end of the data has not been found."""
        if self.order.num_rows is None:
            return None
        whole, rest = divmod(self.order.num_rows, self.layout.global_batch_size)
        return whole if self.drop_last or not rest else whole + 1

    @property
    def samples_per_epoch(self) -> int | None:
        """Rows by which an epoch advances the position, fillers included."""
        batches = self.batches_per_epoch
        return None if batches is None else batches * self.layout.global_batch_size

    def state(self) -> Mapping[str, Any]:
        """Return the position in rows, its epoch, and the number of rows before it in that epoch."""
        epoch, number = self._locate()
        return {
            "position": self._position,
            "epoch": epoch,
            "place": number * self.layout.global_batch_size,
        }

    def go_to(self, state: Mapping[str, Any]) -> None:
        """Take a position: the epoch and the first whole global batch at or after the place of the state.

        A run with another global batch size, or with another `drop_last`, counts other positions; epoch and place mean
        the same in all. After a run with packs it is the place after the last row that went into a pack or waits.
        """
        size = self.layout.global_batch_size
        if (packs := state.get("packing")) is not None:
            epoch, place = self.order.locate(int(packs["next"]))
        elif "place" in state:
            epoch, place = int(state["epoch"]), int(state["place"])
        else:  # consumed samples only: those of a run with these sizes
            self._position = int(state["position"])
            if self._position < 0:
                raise DataError(f"consumed_samples {self._position}: expected 0 or more")
            return
        place = -(-place // size) * size
        if epoch:
            self.order.find_end()
        per_epoch = self.samples_per_epoch
        self._position = place if per_epoch is None else epoch * per_epoch + min(place, per_epoch)

    def batches(self) -> Generator[GlobalBatch, None, None]:
        """Yield global batches from the position on, without end."""
        layout = self.layout
        with closing(self._planned()) as planned:
            for batch, sizes in planned:
                spread = layout.in_order() if sizes is None else self._spread(sizes)
                end = (batch.bucket, batch.epoch) if self._names_epochs else (batch.bucket,)
                rows = [[[[(batch.rows[place], *end)] for place in places] for places in rank] for rank in spread]
                self._position = self._after(batch)
                yield GlobalBatch(rows, self.state())

    def _spread(self, sizes: _Sizes) -> list[list[list[int]]]:
        layout = self.layout
        costs = [sum(self._costs.cost(piece) for piece in row) for row in sizes]
        if self._balance.ranks:
            return balance_ranks(costs, layout.dp_size, layout.micro_batches)
        if self._balance.micro_batches:
            return balance_micro_batches(costs, layout.in_order())
        return layout.in_order()

    def rows_to_measure(self) -> Iterator[int]:
        """Yield the rows whose sizes `batches` asks for."""
        return (row for batch in self._to_measure() for row in batch.rows if row != FILLER)

    def _to_measure(self) -> Iterator[_Batch]:
        """What is measured together: windows, or global batches."""
        if self._grouping is not None:
            return self._cut(self._grouping.window(self.layout.global_batch_size))
        return self._filled(self._cut(1))

    def _planned(self) -> Generator[tuple[_Batch, _Sizes | None], None, None]:
        """Whole global batches; with sizes, if something is balanced."""
        if self._grouping is not None:
            yield from self._grouped(self._grouping)
        elif self._balance:
            yield from self._measured()
        else:
            yield from ((batch, None) for batch in self._filled(self._cut(1)))

    def _grouped(self, grouping: Grouping) -> Generator[tuple[_Batch, _Sizes], None, None]:
        size = self.layout.global_batch_size
        first = self._locate()
        for run, sizes in self._measured():
            key = self.order.seed, run.epoch, run.number
            for number, places in enumerate(grouping.regroup(sizes, size, key), start=run.number):
                if (run.epoch, number) >= first:
                    missing = size - len(places)
                    rows = [run.rows[place] for place in places] + [FILLER] * missing
                    found = [sizes[place] for place in places]
                    bucket = grouping.bucket(found)
                    yield _Batch(run.epoch, number, rows, bucket), found + [_NOTHING] * missing

    def _measured(self) -> Generator[tuple[_Batch, _Sizes], None, None]:
        assert self.measurer is not None, "grouping and balance need sizes"
        batches, prefetched = itertools.tee(self._to_measure())
        rows = (row for batch in prefetched for row in batch.rows if row != FILLER)
        with closing(self.measurer.sizes(rows)) as sizes:
            for batch in batches:
                yield batch, [_NOTHING if row == FILLER else next(sizes) for row in batch.rows]

    def _filled(self, batches: Iterator[_Batch]) -> Iterator[_Batch]:
        size = self.layout.global_batch_size
        for batch in batches:
            yield _Batch(batch.epoch, batch.number, batch.rows + [FILLER] * (size - len(batch.rows)))

    def _cut(self, batches: int) -> Iterator[_Batch]:
        """Cut the order into runs of `batches` global batches; the first run contains the position."""
        size = self.layout.global_batch_size
        first, number = self._locate()
        number -= number % batches
        for epoch in itertools.count(first):
            rows = self.order.epoch(epoch, number * size)
            while run := list(itertools.islice(rows, batches * size)):
                if self.drop_last:
                    del run[len(run) - len(run) % size :]
                if run:
                    yield _Batch(epoch, number, run)
                number += batches
            self._check(self.order.num_rows)
            number = 0

    def _locate(self) -> tuple[int, int]:
        """The epoch of the position, and the global batch within it."""
        size = self.layout.global_batch_size
        index = -(-self._position // size)
        if self.batches_per_epoch is None:  # the end may be before the position: search for it
            self.order.locate((index + 1) * size - 1)
        return divmod(index, self.batches_per_epoch) if self.batches_per_epoch else (0, index)

    def _after(self, batch: _Batch) -> int:
        """The position after a batch."""
        return batch.epoch * (self.samples_per_epoch or 0) + (batch.number + 1) * self.layout.global_batch_size
