"""Packs: full, complete, and the same after a resume with other ranks and micro-batches."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import Any

import numpy as np
import pytest

from mindspeed_mm.data.plan.cost import CostModel
from mindspeed_mm.data.plan.order import FixedOrder, StreamOrder
from mindspeed_mm.data.plan.pack_plan import PackPlanner
from mindspeed_mm.data.plan.packing import best_fit_decreasing, choose_packs
from mindspeed_mm.data.plan.plan import BatchLayout, GlobalBatch
from mindspeed_mm.utils.errors import DataError
from tests.unit.data.fake_data import FakeRows, long_tail, measurer, take

CAPACITY = 1000


def planner(
    dataset: FakeRows, layout: BatchLayout, capacity: int = CAPACITY, num_workers: int = 0, **options: Any
) -> PackPlanner:
    if dataset.streamed:
        order: Any = StreamOrder(dataset.has_row, 16)
    else:
        order = FixedOrder(len(dataset))
    return PackPlanner(order, layout, capacity, measurer(dataset, num_workers), **options)


def packs(batch: GlobalBatch) -> list[list[tuple[int, int]]]:
    """The packs of a global batch, whoever takes them."""
    return sorted(batch.rows)


def tokens(dataset: FakeRows, batch: GlobalBatch) -> list[int]:
    return [sum(dataset.pieces(row)[piece] for row, piece in pack) for pack in batch.rows]


def test_best_fit_decreasing() -> None:
    assert best_fit_decreasing([3, 6, 4, 7, 1], 10) == [[3, 0], [1, 2], [4]]
    assert best_fit_decreasing([5, 5, 5, 5], 10, [9, 9, 1, 1], most_cost=10) == [[0, 3], [1, 2]]
    assert best_fit_decreasing([5, 5], 10, [9, 9], most_cost=8) == [[0], [1]]
    assert best_fit_decreasing([], 10) == []


def plain_best_fit(
    lengths: list[int], capacity: int, costs: list[float], most_cost: float
) -> tuple[list[list[int]], int]:
    """The same by its definition, every pack looked at for every item; and how many packs were looked at."""
    packs: list[list[int]] = []
    looked = 0
    for item in sorted(range(len(lengths)), key=lambda item: (-lengths[item], item)):
        looked += len(packs)
        fits = [
            (sum(lengths[other] for other in pack), -number)
            for number, pack in enumerate(packs)
            if sum(lengths[other] for other in pack) + lengths[item] <= capacity
            and sum(costs[other] for other in pack) + costs[item] <= most_cost
        ]
        if fits:
            packs[-max(fits)[1]].append(item)
        else:
            packs.append([item])
    return packs, looked


def lengths_of(packs: list[list[int]], lengths: list[int]) -> list[list[int]]:
    return sorted([lengths[item] for item in pack] for pack in packs)


@pytest.mark.parametrize("seed", range(20))
def test_best_fit_decreasing_is_that_of_its_definition(seed: int) -> None:
    """Where costs don't matter; where they do, every item is in one pack, and none is too long or too costly."""
    drawn = np.random.RandomState(seed)
    capacity = int(drawn.randint(5, 60))
    lengths = drawn.randint(1, capacity + 1, drawn.randint(1, 120)).tolist()
    free = [0.0] * len(lengths)
    assert lengths_of(best_fit_decreasing(lengths, capacity), lengths) == lengths_of(
        plain_best_fit(lengths, capacity, free, 0.0)[0], lengths
    )
    costs = (drawn.rand(len(lengths)) * 8).round().tolist()
    most = float(drawn.randint(8, 30))
    found = best_fit_decreasing(lengths, capacity, costs, most)
    assert sorted(itertools.chain.from_iterable(found)) == list(range(len(lengths)))
    assert max(sum(lengths[item] for item in pack) for pack in found) <= capacity
    assert max(sum(costs[item] for item in pack) for pack in found) <= most
    assert len(found) <= 1.1 * len(plain_best_fit(lengths, capacity, costs, most)[0]) + 1


@pytest.mark.parametrize("has_pictures", [False, True])
def test_the_bounded_search_fills_packs_as_well_as_the_whole_one(has_pictures: bool) -> None:
    drawn = np.random.RandomState(4)
    patches = (drawn.rand(1200) < 0.5) * drawn.choice([256, 1024, 2304, 4096], 1200) * has_pictures
    lengths = [min(4096, length + int(more) // 4) for length, more in zip(long_tail(1200, 4096, median=100), patches)]
    costs = (
        1.85e10 * np.array(lengths) + 8.8e5 * np.array(lengths) ** 2 + 3.8e9 * patches + 6.1e4 * patches**2
    ).tolist()
    most = 1.05 * sum(costs) / sum(lengths) * 4096
    whole, looked = plain_best_fit(lengths, 4096, costs, most)
    found = best_fit_decreasing(lengths, 4096, costs, most)
    count = sum(lengths) // 4096 * 8 // 9
    filled = [
        sum(sorted((sum(lengths[item] for item in pack) for pack in packs), reverse=True)[:count])
        for packs in (whole, found)
    ]
    assert filled[1] >= 0.998 * filled[0] and looked > 20 * len(lengths)


@pytest.mark.parametrize("seed", range(10))
def test_chosen_packs(seed: int) -> None:
    """As many as asked for, none too long, no item twice, the oldest among them; the same from lists and arrays."""
    drawn = np.random.RandomState(seed)
    lengths = drawn.randint(1, 40, 200).tolist()
    costs = (drawn.rand(200) * np.array(lengths) ** drawn.choice([1, 2])).tolist()
    chosen = choose_packs(lengths, costs, 100, 20)
    items = list(itertools.chain.from_iterable(chosen))
    assert len(chosen) == 20 and len(set(items)) == len(items) and 0 in chosen[0]
    assert all(pack == sorted(pack) and sum(lengths[item] for item in pack) <= 100 for pack in chosen)
    most = 1.05 * sum(costs) / sum(lengths) * 100
    assert all(len(pack) == 1 or sum(costs[item] for item in pack) <= most * (1 + 1e-12) for pack in chosen)
    assert choose_packs(np.array(lengths), np.array(costs), 100, 20) == chosen


def test_the_item_that_has_waited_longest_always_goes() -> None:
    """Even where it fits badly: 7 leaves 3 empty, and every other pair is full."""
    chosen = choose_packs([7, 4, 6, 5, 5], [1.0] * 5, 10, 1)
    assert chosen == [[0]]
    assert choose_packs([7, 4, 6, 5, 5, 3], [1.0] * 6, 10, 2) == [[0, 5], [1, 2]]


@pytest.mark.parametrize("streamed", [False, True])
def test_every_sample_comes_once_and_fits(streamed: bool) -> None:
    """Rows of several pieces too; nothing is dropped at an epoch's end."""
    lengths: list[Any] = [*long_tail(300, CAPACITY), [300, 300, 50], [1000, 1]]
    dataset = FakeRows(lengths, CAPACITY, streamed=streamed)
    plan = planner(dataset, BatchLayout(1, 4, 2))
    samples = [(row, piece) for row in range(len(lengths)) for piece in range(len(dataset.pieces(row)))]
    seen: Counter[tuple[int, int]] = Counter()
    batches = plan.batches()
    while plan.state()["epoch"] < 3:
        batch = next(batches)
        assert max(tokens(dataset, batch)) <= CAPACITY and min(map(len, batch.rows)) > 0
        seen.update(sample for pack in batch.rows for sample in pack)
    waiting = Counter(
        (row, piece)
        for (_, piece), row in zip(plan._pending, plan.order.rows_at([position for position, _ in plan._pending]))
    )
    assert set(seen) == set(samples)
    whole = seen + waiting
    assert min(whole[sample] for sample in samples) >= 3 and max(whole.values()) <= 4


def test_little_stays_empty_and_nothing_starves() -> None:
    """On long-tailed mixes at most 1 % is padding; a sample waits for a few global batches at most."""
    for seed, median, spread, size in ((0, 250, 1.0, 1), (1, 900, 1.3, 1), (2, 900, 1.3, 4), (3, 250, 0.7, 64)):
        dataset = FakeRows(long_tail(20_000, 4096, seed, median, spread), 4096)
        plan = planner(dataset, BatchLayout(1, size), 4096)
        filled, waited = [], []
        for batch in itertools.islice(plan.batches(), max(8, 200 // size)):
            filled += tokens(dataset, batch)
            waited.append(len(plan._pending))
        assert np.mean(filled) >= 0.99 * 4096
        assert max(waited) <= 1500


def test_without_packing_most_would_be_empty() -> None:
    """What the 1 % is to be compared with: the same rows, one a row."""
    lengths = np.array(long_tail(20_000, 4096)[:19_968]).reshape(-1, 64)
    assert 1 - lengths.sum() / (lengths.max(1).sum() * 64) > 0.5


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("stop", [1, 2, 7, 30])
def test_resume_continues_with_the_same_packs(streamed: bool, stop: int) -> None:
    """K05: from plain numbers that went through JSON, on other ranks, micro-batches and workers."""
    lengths: list[Any] = [*long_tail(60, CAPACITY), [600, 600, 7], 0, [400, 0, 2]]
    fresh = lambda: FakeRows(lengths, CAPACITY, streamed=streamed)  # noqa: E731
    whole = take(planner(fresh(), BatchLayout(2, 8, 2)).batches(), stop + 12)
    state = json.loads(json.dumps(whole[stop - 1].state))
    for layout, workers in (
        (BatchLayout(2, 8, 2), 0),
        (BatchLayout(1, 8, 8), 0),
        (BatchLayout(8, 8, 1), 1),
        (BatchLayout(1, 8, 4), 2),
    ):
        again = planner(fresh(), layout, num_workers=workers)
        again.go_to(state)
        assert again.state() == state
        resumed = take(again.batches(), 12)
        assert [packs(batch) for batch in resumed] == [packs(batch) for batch in whole[stop:]]
        assert [batch.state for batch in resumed] == [batch.state for batch in whole[stop:]]


def test_a_resume_measures_what_waits_and_what_follows_only() -> None:
    lengths = long_tail(4000, CAPACITY)
    plan = planner(FakeRows(lengths, CAPACITY), BatchLayout(1, 4))
    state = take(plan.batches(), 100)[-1].state
    dataset = FakeRows(lengths, CAPACITY)
    again = planner(dataset, BatchLayout(1, 4))
    again.go_to(state)
    take(again.batches(), 1)
    rows = again.order.rows_at([position for position, _ in state["packing"]["pending"]])
    assert set(dataset.measured[: len(set(rows))]) == set(rows)
    assert len(dataset.measured) < len(rows) + 100


def test_what_gives_no_sample_is_counted_by_row_and_reason() -> None:
    dataset = FakeRows([0 if row % 10 == 3 else 100 for row in range(500)], CAPACITY)
    plan = planner(dataset, BatchLayout(1, 1))
    left_out = [item for batch in take(plan.batches(), 3) for item in batch.left_out]
    assert left_out and len(left_out) == len(set(left_out))
    assert all(row % 10 == 3 and why == f"fault {row % 2}" for row, why in left_out)


def test_data_without_any_sample_end_the_run() -> None:
    """Instead of looking through epoch after epoch for ever."""
    with pytest.raises(DataError, match=r"no row of the data gives a sample; row \d: fault [01]"):
        take(planner(FakeRows([0] * 5, CAPACITY), BatchLayout(1, 1)).batches(), 1)


def test_few_rows_are_not_read_for_epochs_ahead() -> None:
    """Copies of a row would wait together, and another row come much less often."""
    lengths = [90, 110, 250, 300, 40, 170, 520]
    counts: Counter[int] = Counter()
    for number, batch in enumerate(
        take(planner(FakeRows(lengths, CAPACITY), BatchLayout(1, 1)).batches(), 30), start=1
    ):
        counts.update(row for pack in batch.rows for row, _ in pack)
        assert len(counts) == 7 or number < 5
        assert max(counts.values()) - min(counts[row] for row in range(7)) <= 3


def test_few_rows_longer_than_a_pack_fill_all_packs() -> None:
    """They are cut when they are made, and count as what they are cut to."""
    batch = take(planner(FakeRows([2 * CAPACITY] * 3), BatchLayout(1, 8)).batches(), 1)[0]
    assert len(batch.rows) == 8 and all(len(pack) == 1 for pack in batch.rows)


@pytest.mark.parametrize("options", [{}, {"least_waiting": 100}])
def test_everything_that_waits_is_found_again(options: dict[str, int], said: list[str]) -> None:
    """Also where more waits than a global batch needs."""
    dataset = FakeRows(long_tail(400, CAPACITY), CAPACITY)
    whole = take(planner(dataset, BatchLayout(1, 1), **options).batches(), 30)
    for stop in (1, 12):
        again = planner(dataset, BatchLayout(1, 1), **options)
        again.go_to(whole[stop - 1].state)
        assert [batch.rows for batch in take(again.batches(), 15)] == [batch.rows for batch in whole[stop : stop + 15]]
    assert said == []
    state = whole[0].state["packing"]
    again = planner(dataset, BatchLayout(1, 1), **options)
    again.go_to({"packing": {**state, "pending": [*state["pending"], [state["next"], 3]]}})
    take(again.batches(), 1)
    assert [line for line in said if line.startswith("1 sample(s) that waited to be packed")]


def test_dynamic_batching_reads_ahead_as_far_as_it_is_told() -> None:
    plan = planner(FakeRows([10] * 5000, CAPACITY), BatchLayout(1, 1), least_waiting=4000)
    take(plan.batches(), 1)
    assert plan.state()["packing"]["next"] == 4000
    dataset = FakeRows([2000] * 100)  # longer than a pack: cut to it when it is made
    first = FixedOrder(100).rows_of(0)[:2].tolist()
    assert take(planner(dataset, BatchLayout(1, 2)).batches(), 1)[0].rows == [[(row, 0)] for row in first]


def test_packs_of_like_cost() -> None:
    """Rows with pictures cost more a token: they are spread over the packs."""
    patches = [400 if row % 2 else 0 for row in range(2000)]
    dataset = FakeRows([100] * 2000, CAPACITY, patches=patches)
    costs = CostModel(per_token=1.0, per_patch=1.0)
    worst: dict[bool, list[float]] = {True: [], False: []}
    for known, values in worst.items():
        plan = planner(dataset, BatchLayout(1, 8, 8), costs=costs if known else None)
        for batch in take(plan.batches(), 20):
            spent = [sum(costs.cost(dataset.measure(row)[0]) for row, _ in pack) for pack in batch.rows]
            values.append(float(max(spent) / np.mean(spent)))
    assert np.mean(worst[True]) < 1.12 < 1.3 < np.mean(worst[False])
