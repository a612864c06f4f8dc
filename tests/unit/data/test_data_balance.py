"""Rows to ranks and micro-batches by cost, and samplers that put rows of like cost together."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest

from mindspeed_mm.data.plan.balance import balance_micro_batches, balance_ranks, even_split
from mindspeed_mm.data.plan.cost import AttentionCost, CostModel
from mindspeed_mm.data.plan.fixed_plan import Balance, FixedPlanner
from mindspeed_mm.data.plan.grouping import Grouping
from mindspeed_mm.data.plan.order import FixedOrder, StreamOrder
from mindspeed_mm.data.plan.pack_plan import PackPlanner
from mindspeed_mm.data.plan.plan import FILLER, BatchLayout, GlobalBatch
from tests.unit.data.data_rows import flat
from tests.unit.data.fake_data import FakeRows, long_tail, measurer, take

# A language model of 3 billion weights and a tower of 0.6, as config.json's numbers give them.
COSTS = CostModel(per_token=1.85e10, attention=AttentionCost(1.76e6), per_patch=3.8e9, per_squared_patch=6.1e4)


def mixed(rows: int, longest: int = 4096) -> FakeRows:
    """Long-tailed texts, half of them with a picture of 64 to 1024 tokens."""
    drawn = np.random.RandomState(1)
    patches = (drawn.rand(rows) < 0.5) * drawn.choice([256, 1024, 2304, 4096], rows)
    lengths = [min(longest, text + int(more) // 4) for text, more in zip(long_tail(rows, 2000, median=200), patches)]
    return FakeRows(lengths, longest, patches=patches.tolist())


def fixed(dataset: FakeRows, layout: BatchLayout, **options: Any) -> FixedPlanner:
    order = StreamOrder(dataset.has_row, 16) if dataset.streamed else FixedOrder(len(dataset))
    return FixedPlanner(order, layout, options.pop("drop_last", True), measurer(dataset), **options)


def rows_of(batch: GlobalBatch) -> list[int]:
    return [row for pack in batch.rows for row, _ in pack]


def loads(dataset: FakeRows, batch: GlobalBatch) -> np.ndarray:
    """Cost of each rank's micro-batches, [ranks, micro-batches]."""
    return np.array(
        [
            [
                sum(COSTS.cost(dataset.measure(row)[0]) for pack in rows for row, _ in pack if row != FILLER)
                for rows in rank
            ]
            for rank in batch.micro_batches
        ]
    )


def test_even_split() -> None:
    assert even_split([5, 4, 3, 2], 2) == [[0, 3], [1, 2]]
    assert even_split([5, 1], 2, np.array([9.0, 0.0])) == [[1], [0]]
    costs = np.random.RandomState(0).lognormal(0, 1, 64).tolist()
    parts = even_split(costs, 4)
    assert sorted(flat(parts)) == list(range(64)) and {len(part) for part in parts} == {16}
    sums = [sum(costs[item] for item in part) for part in parts]
    assert max(sums) / min(sums) < 1.01
    costs = [7, 7, 1, 5, 9, 8]  # the greedy walk alone gives 20 and 17; a swap mends it
    assert sorted(sum(costs[item] for item in part) for part in even_split(costs, 2)) == [18, 19]


def test_rows_of_like_cost_make_up_a_micro_step() -> None:
    costs = [1.0, 8, 2, 7, 3, 6, 4, 5]
    spread = balance_ranks(costs, ranks=2, micro_batches=2)
    steps = [sorted(costs[row] for rank in spread for row in rank[step]) for step in (0, 1)]
    assert steps == [[5, 6, 7, 8], [1, 2, 3, 4]]
    assert [sum(costs[row] for row in flat(rank)) for rank in spread] == [18, 18]
    assert [[len(batch) for batch in rank] for rank in spread] == [[2, 2], [2, 2]]


def test_micro_batches_of_a_rank() -> None:
    costs = [1.0, 5, 2, 3, 9, 4]
    spread = balance_micro_batches(costs, [[[0], [1], [2]], [[3], [4], [5]]])
    assert spread == [[[1], [2], [0]], [[4], [5], [3]]]


@pytest.mark.parametrize("ranks", [8, 64])
def test_ranks_have_as_much_to_do(ranks: int) -> None:
    """A simulation: most loaded rank over the mean, at most 1.05 with balance and far above without."""
    dataset = mixed(40 * ranks * 16)
    layout = BatchLayout(2, ranks * 16, ranks)

    def imbalance(plan: Any) -> float:
        most = [
            load.sum(1).max() / load.sum(1).mean() for load in map(lambda b: loads(dataset, b), take(plan.batches(), 4))
        ]
        return float(np.mean(most))

    without = imbalance(fixed(dataset, layout))
    assert without > 1.3
    assert imbalance(fixed(dataset, layout, balance=Balance(ranks=True), costs=COSTS)) <= 1.05
    packed = PackPlanner(FixedOrder(len(dataset)), BatchLayout(1, ranks * 4, ranks), 4096, measurer(dataset), COSTS)
    assert imbalance(packed) <= 1.05


@pytest.mark.parametrize("ranks", [8, 64])
def test_ranks_wait_less_in_every_micro_step(ranks: int) -> None:
    """What counts where each micro-batch gathers weights: the sum over micro-steps of the slowest rank's."""
    dataset = mixed(40 * ranks * 16)
    layout = BatchLayout(1, ranks * 8, ranks)

    def waits(plan: Any) -> float:
        return float(
            np.mean(
                [
                    load.max(0).sum() / load.mean(0).sum()
                    for load in map(lambda b: loads(dataset, b), take(plan.batches(), 4))
                ]
            )
        )

    without, over_ranks, within = (
        waits(fixed(dataset, layout, balance=balance, costs=COSTS))
        for balance in (Balance(), Balance(ranks=True), Balance(micro_batches=True))
    )
    assert over_ranks < 1.6 < within < 0.85 * without
    packed = PackPlanner(FixedOrder(len(dataset)), BatchLayout(1, ranks * 4, ranks), 4096, measurer(dataset), COSTS)
    assert waits(packed) < 1.06


@pytest.mark.parametrize("drop_last", [True, False])
def test_balance_keeps_the_rows_of_every_global_batch(drop_last: bool) -> None:
    dataset = mixed(50)
    plain = fixed(dataset, BatchLayout(2, 8), drop_last=drop_last)
    for balance in (Balance(ranks=True), Balance(micro_batches=True)):
        for layout in (BatchLayout(2, 8, 2), BatchLayout(1, 8, 4), BatchLayout(8, 8, 1)):
            balanced = fixed(dataset, layout, drop_last=drop_last, balance=balance, costs=COSTS)
            for one, other in zip(take(plain.batches(), 20), take(balanced.batches(), 20)):
                assert sorted(rows_of(one)) == sorted(rows_of(other))
                assert [[len(batch) for batch in rank] for rank in other.micro_batches] == [
                    [layout.micro_batch_size] * layout.micro_batches
                ] * layout.dp_size
            plain.go_to({"position": 0})


def test_nothing_is_measured_without_need() -> None:
    dataset = mixed(100)
    take(fixed(dataset, BatchLayout(1, 10)).batches(), 30)
    assert dataset.measured == []


GROUPINGS = [Grouping("alike", "tokens"), Grouping("alike", "patches"), Grouping("even", "patches")]


@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("drop_last", [True, False])
def test_groups_hold_every_row_once_and_resume(grouping: Grouping, streamed: bool, drop_last: bool) -> None:
    lengths = [10 + row % 17 for row in range(419)]  # not a multiple of 4, and more than a window of 50 batches
    dataset = FakeRows(lengths, patches=[row % 13 for row in range(419)], streamed=streamed)
    options = {"grouping": grouping, "drop_last": drop_last}
    whole = take(fixed(dataset, BatchLayout(1, 4, 2), **options).batches(), 330)
    per_epoch = 104 if drop_last else 105
    for epoch in range(3):
        rows = flat(rows_of(batch) for batch in whole[epoch * per_epoch : (epoch + 1) * per_epoch])
        real = [row for row in rows if row != FILLER]
        assert len(set(real)) == len(real) == (416 if drop_last else 419)
        assert rows.count(FILLER) == (0 if drop_last else 1)
    for stop in (3, 51, 103, 104, 105, 200):
        again = fixed(dataset, BatchLayout(4, 4), **options)
        again.go_to(json.loads(json.dumps(whole[stop - 1].state)))
        for one, other in zip(take(again.batches(), 60), whole[stop:]):
            assert sorted(rows_of(one)) == sorted(rows_of(other))


def test_rows_of_like_length_share_a_global_batch() -> None:
    dataset = mixed(4000)
    padding = []
    for grouping in (None, Grouping("alike", "tokens")):
        batches = take(fixed(dataset, BatchLayout(1, 16), grouping=grouping).batches(), 100)
        lengths = np.array([[dataset.lengths[row] for row in rows_of(batch)] for batch in batches])
        padding.append(1 - lengths.sum() / (16 * lengths.max(1).sum()))
    assert padding[1] < 0.1 < 0.5 < padding[0]
    means = lengths.mean(1)[:50]
    assert np.abs(np.corrcoef(means, np.arange(50))[0, 1]) < 0.5  # not from long to short


def test_pictures_are_bucketed_or_spread() -> None:
    dataset = mixed(4000)
    assert dataset.patches is not None
    spreads = []
    for grouping in (Grouping("alike", "patches"), None, Grouping("even", "patches")):
        batches = take(fixed(dataset, BatchLayout(1, 16), grouping=grouping).batches(), 50)
        sums = [sum(dataset.patches[row] for row in rows_of(batch)) for batch in batches]
        spreads.append(np.std(sums) / np.mean(sums))
    assert spreads[0] > 2 * spreads[1] > 20 * spreads[2]


@pytest.mark.parametrize("drop_last", [True, False])
def test_streamed_rows_in_plain_order(drop_last: bool) -> None:
    """An epoch ends where the data do, and any position is found again."""
    dataset = FakeRows([1] * 22, streamed=True)
    whole = take(fixed(dataset, BatchLayout(1, 4, 2), drop_last=drop_last).batches(), 24)
    per_epoch = 5 if drop_last else 6
    for epoch in range(4):
        rows = sorted(flat(rows_of(batch) for batch in whole[epoch * per_epoch : (epoch + 1) * per_epoch]))
        assert len(set(rows)) == (20 if drop_last else 23) and rows.count(FILLER) == (0 if drop_last else 2)
    for stop in range(1, 20):
        again = fixed(dataset, BatchLayout(2, 4), drop_last=drop_last)
        again.go_to(whole[stop - 1].state)
        assert [sorted(rows_of(b)) for b in take(again.batches(), 4)] == [
            sorted(rows_of(b)) for b in whole[stop : stop + 4]
        ]


def test_the_same_state_after_packs_and_without(drop_last: bool = True) -> None:
    """A checkpoint with packs read by a run without goes on at the next global batch, and the other way round."""
    dataset = FakeRows(long_tail(100, 1000), 1000)
    packed = PackPlanner(FixedOrder(100), BatchLayout(1, 2), 1000, measurer(dataset))
    states = [batch.state for batch in itertools.islice(packed.batches(), 40)]
    for state in states:
        position = state["packing"]["next"]
        plan = fixed(dataset, BatchLayout(1, 8))
        plan.go_to(state)
        first = [row for row, _ in flat(take(plan.batches(), 1)[0].rows)]
        epoch, place = divmod(position, 100)
        epoch, place = (epoch + 1, 0) if place > 88 else (epoch, -(-place // 8) * 8)
        assert first == FixedOrder(100).rows_of(epoch)[place : place + 8].tolist()
    plain = fixed(dataset, BatchLayout(1, 8))
    for number, batch in enumerate(take(plain.batches(), 30), start=1):
        packed.go_to(batch.state)
        epoch, batches = divmod(number, 12)
        assert packed.state()["packing"] == {"next": epoch * 100 + batches * 8, "pending": [], "capacity": 1000}
