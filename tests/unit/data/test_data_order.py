"""The order of rows: addressed by position, with and without a known number of rows."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from mindspeed_mm.data.plan import order as orders
from mindspeed_mm.data.plan.order import FixedOrder, Order, StreamOrder
from mindspeed_mm.utils.errors import DataError


def stream(rows: int, buffer_size: int = 8, shuffle: bool = True, seed: int = 1) -> StreamOrder:
    """A stream of so many rows, that fails if it is asked for rows far ahead."""
    order = StreamOrder(lambda row: row < rows, buffer_size, shuffle, seed)
    return order


def first(order: Order, count: int, position: int = 0) -> list[int]:
    return list(itertools.islice(order.rows_from(position), count))


def test_orders_of_known_length_never_change() -> None:
    """Checkpoints rely on it."""
    assert first(FixedOrder(8, seed=42), 16) == [4, 1, 3, 6, 0, 7, 2, 5, 1, 2, 5, 3, 6, 0, 4, 7]
    assert first(FixedOrder(3, shuffle=False), 7) == [0, 1, 2, 0, 1, 2, 0]


def test_streamed_orders_never_change() -> None:
    assert first(stream(12, 4, seed=42), 24) == STREAMED


STREAMED = [0, 1, 4, 5, 3, 6, 7, 9, 8, 10, 2, 11, 1, 2, 5, 6, 3, 4, 8, 7, 0, 10, 9, 11]


@pytest.mark.parametrize("rows", [1, 5, 8, 9, 100, 1023, 1024, 1025, 3000])
def test_a_stream_gives_every_row_once_an_epoch(rows: int) -> None:
    order = stream(rows)
    epochs = [list(order.epoch(number)) for number in range(3)]
    assert all(sorted(epoch) == list(range(rows)) for epoch in epochs)
    assert rows < 5 or epochs[0] != epochs[1] != epochs[2]
    assert order.num_rows == rows
    assert list(stream(rows, shuffle=False).epoch(0)) == list(range(rows))


def test_a_row_is_drawn_no_earlier_than_it_is_in_the_buffer() -> None:
    drawn = list(stream(100, 8).epoch(0))
    assert all(row < place + 8 for place, row in enumerate(drawn))


@pytest.mark.parametrize("order_of", [lambda: FixedOrder(20, seed=3), lambda: stream(20), lambda: stream(20, 50)])
@pytest.mark.parametrize("position", [0, 7, 20, 33, 40, 59])
def test_any_position_is_found_again(order_of: object, position: int) -> None:
    whole = first(order_of(), 80)  # type: ignore[operator]
    assert first(order_of(), 20, position) == whole[position : position + 20]  # type: ignore[operator]
    asked = [position, position, position + 3, position + 19]
    assert order_of().rows_at(asked) == [whole[place] for place in asked]  # type: ignore[operator]


def test_a_stream_is_searched_no_further_than_needed() -> None:
    """And its rows are never read: the order works on numbers."""
    furthest = 0

    def has_row(row: int) -> bool:
        nonlocal furthest
        furthest = max(furthest, row)
        return row < 10**9

    order = StreamOrder(has_row, buffer_size=100)
    first(order, 50, position=2000)
    assert furthest <= 2000 + 100 + 50 + 1024 and order.num_rows is None


def test_no_rows() -> None:
    with pytest.raises(DataError, match="no rows"):
        FixedOrder(0)
    with pytest.raises(DataError, match="no rows"):
        first(stream(0), 1)


def test_the_order_of_an_epoch_is_that_of_a_stable_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where two rows have drawn the same number, which the faster sort leaves in any order."""
    for rows, epoch in ((1, 0), (2, 1), (5000, 3)):
        drawn = np.random.PCG64(np.random.SeedSequence((7, epoch))).random_raw(rows)
        found = orders.shuffled(rows, 7, epoch)
        assert found.tolist() == np.argsort(drawn, kind="stable").tolist() and found.dtype == np.int32
    few = np.random.RandomState(0).randint(0, 10, 5000).astype(np.uint64)
    monkeypatch.setattr(orders, "_stream", lambda *_: SimpleNamespace(random_raw=lambda count: few[:count]))
    assert orders.shuffled(5000, 7, 0).tolist() == np.argsort(few, kind="stable").tolist()
    assert orders.as_row_numbers(np.array([5, 2**31])).dtype == np.int64
