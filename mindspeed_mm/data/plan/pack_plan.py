"""The plan with packs: every row of a batch has several samples, up to a limit of tokens."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

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
#: rows that are taken from the measurer at once
_MOST_ROWS = 4096


@dataclass(frozen=True)
class _Samples:
    """Samples in the order in which they came: arrays of one number a sample, [samples].

    Attributes:
        positions: position of the row in the order, int64.
        rows: row of the data set, int64.
        pieces: piece of the row, int64.
        tokens: int64, at most the capacity of a pack.
        costs: float64.
    """

    positions: np.ndarray
    rows: np.ndarray
    pieces: np.ndarray
    tokens: np.ndarray
    costs: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, chosen: slice | np.ndarray) -> _Samples:
        return _Samples(*(column[chosen] for column in self._columns()))

    def __add__(self, other: _Samples) -> _Samples:
        pairs = zip(self._columns(), other._columns(), strict=True)
        return _Samples(*(np.concatenate(pair) for pair in pairs))

    def _columns(self) -> tuple[np.ndarray, ...]:
        return self.positions, self.rows, self.pieces, self.tokens, self.costs


@dataclass
class _Block:
    """Rows that have been measured and not been read yet.

    Attributes:
        rows: their numbers, in order.
        samples: their samples.
        places: the row of each sample, as a place in `rows`.
        faults: (place, reason) of the rows that give no sample.
    """

    rows: list[int]
    samples: _Samples
    places: np.ndarray
    faults: list[tuple[int, str]]

    def take(self, count: int) -> _Block:
        """Remove the first `count` rows, and return them."""
        cut = int(np.searchsorted(self.places, count))
        taken = _Block(
            self.rows[:count],
            self.samples[:cut],
            self.places[:cut],
            [fault for fault in self.faults if fault[0] < count],
        )
        self.rows, self.samples, self.places = self.rows[count:], self.samples[cut:], self.places[cut:] - count
        self.faults = [(place - count, why) for place, why in self.faults if place >= count]
        return taken


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
        self.measurer = measurer
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

    def rows_to_measure(self) -> Iterator[int]:
        """Yield the rows whose sizes `batches` asks for: those of the samples that wait, then those that follow."""
        before = self.order.rows_at([position for position, _ in self._pending])
        return itertools.chain(before, self.order.rows_from(self._next))

    def batches(self) -> Generator[GlobalBatch, None, None]:
        """Yield global batches from the state on, without end."""
        size = self.layout.global_batch_size
        pending = self._pending
        with closing(self.measurer.measured(self.rows_to_measure())) as measured:
            waiting = self._measured_samples(list(itertools.islice(measured, len(pending))), pending)
            if lost := len(pending) - len(waiting):
                notice(f"{lost} sample(s) that waited to be packed at the checkpoint aren't in the data any more")
            ahead = self._block([])
            while True:
                left_out: list[tuple[int, str]] = []
                waiting, ahead = self._fill(waiting, ahead, measured, left_out)
                packs = choose_packs(waiting.tokens, waiting.costs, self.capacity, size)
                costs = waiting.costs.tolist()
                spread = balance_ranks(
                    [sum(costs[item] for item in pack) for pack in packs],
                    self.layout.dp_size,
                    self.layout.micro_batches,
                )
                samples = list(zip(waiting.rows.tolist(), waiting.pieces.tolist(), strict=True))
                rows: list[PlannedRow] = [[samples[item] for item in pack] for pack in packs]
                stays = np.ones(len(waiting), dtype=bool)
                stays[list(itertools.chain.from_iterable(packs))] = False
                waiting = waiting[stays]
                self._pending = list(zip(waiting.positions.tolist(), waiting.pieces.tolist(), strict=True))
                micro_batches = [[[rows[pack] for pack in batch] for batch in rank] for rank in spread]
                yield GlobalBatch(micro_batches, self.state(), tuple(left_out))

    def _fill(
        self, waiting: _Samples, ahead: _Block, measured: Iterator[int], left_out: list[tuple[int, str]]
    ) -> tuple[_Samples, _Block]:
        """Read rows until enough samples wait.

        How many rows are read depends on the state alone, not on how many have been measured in advance.

        Returns:
            The samples that wait then, and what has been measured beyond them.
        """
        without = 0
        while True:
            count, is_enough = self._rows_to_read(waiting, ahead)
            taken = ahead.take(count)
            self._next += count
            waiting = waiting + taken.samples
            left_out += [(taken.rows[place], why) for place, why in taken.faults]
            without = count - 1 - int(taken.places[-1]) if len(taken.places) else without + count
            if without and self.order.num_rows is not None and without >= self.order.num_rows:
                last, why = left_out[-1]
                raise DataError(f"no row of the data gives a sample; row {last + 1}: {why}")
            if is_enough:
                return waiting, ahead
            ahead = self._block(list(itertools.islice(measured, self._estimate(waiting))))

    def _rows_to_read(self, waiting: _Samples, ahead: _Block) -> tuple[int, bool]:
        """Return how many of the rows `ahead` are needed, and whether they are enough."""
        size, number = self.layout.global_batch_size, len(ahead.rows)
        cuts = np.searchsorted(ahead.places, np.arange(number + 1))  # samples before each row
        tokens = int(waiting.tokens.sum()) + np.concatenate(([0], np.cumsum(ahead.samples.tokens)))[cuts]
        needs = tokens < (size + max(_SLACK, size // _SLACK_SHARE)) * self.capacity
        if isinstance(self.order, FixedOrder):
            # with few rows, no further epochs are read in advance: copies of a row would wait together, and others not
            first = (waiting if len(waiting) else ahead.samples).positions[:1]
            begun = int(first[0]) if len(first) else self._next
            needs &= self._next + np.arange(number + 1) - begun < self.order.num_rows
        needs |= (tokens < size * self.capacity) | (len(waiting) + cuts < self._least_waiting)
        enough = np.flatnonzero(~needs)
        return (int(enough[0]), True) if len(enough) else (number, False)

    def _estimate(self, waiting: _Samples) -> int:
        """Rows to measure next: somewhat fewer than will be needed, if those to come are like those that wait."""
        size = self.layout.global_batch_size
        missing = (size + max(_SLACK, size // _SLACK_SHARE)) * self.capacity - int(waiting.tokens.sum())
        tokens = max(1, int(waiting.tokens.sum()) // max(1, len(waiting))) if len(waiting) else self.capacity
        return min(_MOST_ROWS, max(1, missing // tokens * 3 // 4, self._least_waiting - len(waiting)))

    def _measured_samples(self, rows: list[int], pending: Sequence[tuple[int, int]]) -> _Samples:
        """The samples that waited when the state was taken: `rows` are those of the pending samples, one each."""
        block = self._block(rows)
        wanted = np.array(pending, dtype=np.int64).reshape(-1, 2)
        samples = replace(block.samples, positions=wanted[block.places, 0])
        return samples[samples.pieces == wanted[block.places, 1]]

    def _block(self, rows: list[int]) -> _Block:
        """The samples of rows that have been measured, the first of which is the next one."""
        found = self.measurer.table.samples(rows)
        tokens = np.minimum(found.tokens, self.capacity)  # the data set cuts longer samples
        costs = self._costs.costs(tokens, found.patches, found.squared_patches)
        numbers = np.asarray(rows, dtype=np.int64)[found.places]
        samples = _Samples(self._next + found.places, numbers, found.pieces, tokens, np.asarray(costs))
        return _Block(rows, samples, found.places, list(found.faults))
