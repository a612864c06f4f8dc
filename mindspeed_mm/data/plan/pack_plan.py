"""The plan with packs: every row of a batch has several samples, up to a limit of tokens."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from mindspeed_mm.data.media.media import SampleSize
from mindspeed_mm.data.plan.balance import balance_ranks
from mindspeed_mm.data.plan.cost import CostModel
from mindspeed_mm.data.plan.measuring import Measurer
from mindspeed_mm.data.plan.order import FixedOrder, Order
from mindspeed_mm.data.plan.packing import choose_packs
from mindspeed_mm.data.plan.plan import BatchLayout, GlobalBatch, PlannedRow
from mindspeed_mm.utils.errors import DataError
from mindspeed_mm.utils.log import notice

#: samples that wait beyond those of the next global batch, in packs: at least, and as a share of it; with more of
#: them there is less padding
_SLACK, _SLACK_SHARE = 16, 8


@dataclass(frozen=True)
class _Waiting:
    """A sample that waits for a pack: its position in the order, its row and piece, and its size."""

    position: int
    row: int
    piece: int
    size: SampleSize


class PackPlanner:
    """Global batches of packs, which continue over the ends of epochs: every row of an epoch comes once.

    Samples wait, in order, until there are enough to fill the packs of a global batch well (or an epoch's worth, if
    that fills them); those that fit badly wait on, but the one that has waited longest always goes. Packs get their
    ranks by cost (`balance_ranks`).

    The state is the next position of the order and the samples that wait, as [position, piece]. A resume measures
    these anew, and nothing else.

    Args:
        order: The order of rows.
        layout: Sizes of a batch; its rows are packs.
        capacity: Tokens of a pack.
        measurer: Measures rows. The data set cuts a sample longer than a pack to the capacity.
        costs: The measure of balance.
        least_waiting: Least number of waiting samples.
    """

    samples_per_epoch: int | None = None  # packs don't end with an epoch

    def __init__(
        self,
        order: Order,
        layout: BatchLayout,
        capacity: int,
        measurer: Measurer,
        costs: CostModel | None = None,
        least_waiting: int = 0,
    ) -> None:
        self.order = order
        self.layout = layout
        self.capacity = capacity
        self._measurer = measurer
        self._costs = costs or CostModel()
        self._least_waiting = least_waiting
        self._next = 0
        self._pending: list[tuple[int, int]] = []

    def state(self) -> Mapping[str, Any]:
        """The next position of the order, and the samples that wait."""
        pending = [list(sample) for sample in self._pending]
        return {
            "epoch": self.order.locate(self._next)[0],
            "packing": {"next": self._next, "pending": pending, "capacity": self.capacity},
        }

    def go_to(self, state: Mapping[str, Any]) -> None:
        """Take a state; after a run without packs, its place in the order."""
        packs = state.get("packing")
        if packs is None:
            self._next, self._pending = self._position_of(state), []
            return
        if packs["capacity"] != self.capacity:
            notice(
                f"packs held {packs['capacity']} tokens when the checkpoint was written and hold {self.capacity} now: "
                "samples come together in other packs than they would have"
            )
        self._next = int(packs["next"])
        self._pending = [(int(position), int(piece)) for position, piece in packs["pending"]]

    def _position_of(self, state: Mapping[str, Any]) -> int:
        if "place" not in state:
            return int(state["position"])
        epoch = int(state["epoch"])
        return epoch * (self.order.find_end() if epoch else 0) + int(state["place"])

    def batches(self) -> Iterator[GlobalBatch]:
        """Yield global batches from the state on, without end."""
        size = self.layout.global_batch_size
        left_out: list[tuple[int, str]] = []
        waiting: list[_Waiting] = []
        with closing(self._arriving(left_out)) as arriving:
            for _ in self._pending:
                waiting += next(arriving)
            tokens = sum(sample.size.tokens for sample in waiting)
            if lost := len(self._pending) - len(waiting):
                notice(f"{lost} sample(s) that waited to be packed at the checkpoint aren't in the data any more")
            while True:
                while self._needs_more(waiting, tokens):
                    samples = next(arriving)
                    waiting += samples
                    tokens += sum(sample.size.tokens for sample in samples)
                costs = [self._costs.cost(sample.size) for sample in waiting]
                packs = choose_packs([sample.size.tokens for sample in waiting], costs, self.capacity, size)
                rows: list[PlannedRow] = [[(waiting[item].row, waiting[item].piece) for item in pack] for pack in packs]
                spread = balance_ranks(
                    [sum(costs[item] for item in pack) for pack in packs],
                    self.layout.dp_size,
                    self.layout.micro_batches,
                )
                gone = {item for pack in packs for item in pack}
                waiting = [sample for item, sample in enumerate(waiting) if item not in gone]
                tokens = sum(sample.size.tokens for sample in waiting)
                self._pending = [(sample.position, sample.piece) for sample in waiting]
                micro_batches = [[[rows[pack] for pack in batch] for batch in rank] for rank in spread]
                yield GlobalBatch(micro_batches, self.state(), tuple(left_out))
                left_out.clear()

    def _needs_more(self, waiting: Sequence[_Waiting], tokens: int) -> bool:
        """Whether more samples must be read before packs are chosen; depends on the state alone."""
        size = self.layout.global_batch_size
        if tokens < size * self.capacity or len(waiting) < self._least_waiting:
            return True
        if tokens >= (size + max(_SLACK, size // _SLACK_SHARE)) * self.capacity:
            return False
        # with few rows, no further epochs are read in advance: copies of a row would wait together, and other rows not
        return not isinstance(self.order, FixedOrder) or self._next - waiting[0].position < self.order.num_rows

    def _arriving(self, left_out: list[tuple[int, str]]) -> Generator[list[_Waiting], None, None]:
        """The samples that waited when the state was taken, then those of the rows that follow, row by row."""
        pending = self._pending
        before = self.order.rows_at([position for position, _ in pending])
        measured, rows = itertools.tee(itertools.chain(before, self.order.rows_from(self._next)))
        without = 0
        with closing(self._measurer.sizes(measured)) as sizes:
            for (position, piece), row, found in zip(pending, rows, sizes):
                yield [sample for sample in self._samples(position, row, found) if sample.piece == piece]
            for row, found in zip(rows, sizes):
                samples = self._samples(self._next, row, found)
                left_out += [(row, size.fault or "no tokens") for size in found if not size.tokens]
                self._next += 1
                without = 0 if samples else without + 1
                if without and without == self.order.num_rows:
                    last, why = left_out[-1]
                    raise DataError(f"no row of the data gives a sample; row {last + 1}: {why}")
                yield samples

    def _samples(self, position: int, row: int, found: Sequence[SampleSize]) -> list[_Waiting]:
        return [_Waiting(position, row, piece, self._cut(size)) for piece, size in enumerate(found) if size.tokens]

    def _cut(self, size: SampleSize) -> SampleSize:
        """The size of a sample as the data set cuts it: to the capacity of a pack."""
        if size.tokens <= self.capacity:
            return size
        return replace(size, tokens=self.capacity)
