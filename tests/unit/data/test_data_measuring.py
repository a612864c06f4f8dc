"""Sizes of rows, found ahead of time."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from mindspeed_mm.data.media.media import SampleSize
from mindspeed_mm.data.plan.measuring import Measurer, SizeTable
from mindspeed_mm.data.plan.order import FixedOrder
from mindspeed_mm.utils.errors import BadSample, DataError
from tests.unit.data.fake_data import FakeRows, measurer, take


def test_a_table_keeps_what_it_is_told() -> None:
    table, sizes = SizeTable(), {
        5: [SampleSize(7)],
        0: [SampleSize(3, 4, 16)],
        5000: [SampleSize(2), SampleSize(9)],
        1: [SampleSize(0, fault="torn")],
        70: [SampleSize(1, 2**40, 2**50)],
        6: [],
    }  # fmt: skip
    for row, value in sizes.items():
        assert row not in table
        table[row] = value
        table[row] = value
    assert len(table) == len(sizes) and 2 not in table and 10**6 not in table
    assert {row: table[row] for row in sizes} == sizes
    rows = [70, 5000, 6, 1, 5, 0, 5000]
    found = table.samples(rows)
    samples = [(place, piece, size) for place, row in enumerate(rows) for piece, size in enumerate(sizes[row])]
    expected = [(place, piece, size) for place, piece, size in samples if size.tokens]
    assert list(zip(found.places.tolist(), found.pieces.tolist())) == [(place, piece) for place, piece, _ in expected]
    columns = (found.tokens.tolist(), found.patches.tolist(), found.squared_patches.tolist())
    assert list(map(SampleSize, *columns)) == [size for *_, size in expected]
    assert list(found.faults) == [(3, "torn")] and not len(table.samples([]).tokens)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_sizes_come_in_the_order_of_the_rows(workers: int) -> None:
    """Over several epochs, rows of several pieces and faults too."""
    lengths = [*range(1, 150), [4, 5], 0]
    dataset = FakeRows(lengths, patches=list(range(151)))
    order = FixedOrder(len(lengths))
    rows = take(order.rows_from(0), 500)
    found = take(measurer(dataset, workers).sizes(order.rows_from(0)), 500)
    assert found == [dataset.measure(row) for row in rows]


def test_a_size_is_found_once() -> None:
    dataset = FakeRows([3] * 40)
    sizes = measurer(dataset)
    take(sizes.sizes(FixedOrder(40).rows_from(0)), 130)
    assert sorted(dataset.measured) == list(range(40)) and sizes.is_complete
    dataset.measured.clear()
    take(sizes.sizes(FixedOrder(40).rows_from(77)), 50)
    assert dataset.measured == []


def children() -> set[int]:
    mine = str(os.getpid())
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, rest = stat.read_text().rsplit(")", 1)
        except OSError:
            continue
        if rest.split()[1] == mine and rest.split()[0] != "Z":
            found.add(int(name.split()[0]))
    return found


def test_workers_end_when_every_size_is_known_or_nobody_asks() -> None:
    before = children()
    sizes = measurer(FakeRows([3] * 100), 1).sizes(FixedOrder(100).rows_from(0))
    take_one = next(sizes)
    assert take_one == [SampleSize(3)] and len(children() - before) == 1
    for _ in range(250):
        next(sizes)
    assert children() == before
    other = measurer(FakeRows([3] * 10_000), 1).sizes(FixedOrder(10_000).rows_from(0))
    next(other)
    other.close()
    assert children() == before


class Slow(FakeRows):
    def measure(self, index: int) -> list[SampleSize]:
        time.sleep(0.002)
        return super().measure(index)


def test_workers_run_ahead_of_who_asks() -> None:
    """While the run trains, the next rows are measured: asking for them again takes no time."""
    sizes = measurer(Slow([3] * 10_000), 1).sizes(FixedOrder(10_000).rows_from(0))
    next(sizes)
    time.sleep(1.0)
    started = time.perf_counter()
    for _ in range(200):
        next(sizes)
    assert time.perf_counter() - started < 0.2  # 0.4 s of measuring
    sizes.close()


class Torn(FakeRows):
    def measure(self, index: int) -> list[SampleSize]:
        if index == 70:
            raise BadSample("rows.json, row 71: torn", "torn")
        return super().measure(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_in_a_row_is_the_same_sentence_everywhere(workers: int) -> None:
    with pytest.raises(DataError) as raised:
        take(measurer(Torn([3] * 100), workers).sizes(range(100)), 100)
    assert str(raised.value) == "rows.json, row 71: torn"


class Dying(FakeRows):
    def measure(self, index: int) -> list[SampleSize]:
        if index == 70:
            os._exit(1)
        return super().measure(index)


def test_a_dead_worker_is_an_error() -> None:
    with pytest.raises(DataError, match="a data worker died"):
        take(measurer(Dying([3] * 100), 1).sizes(range(100)), 100)


def test_the_end_of_the_rows_is_the_end() -> None:
    for workers in (0, 1):
        assert len(list(Measurer(FakeRows([1] * 50), workers, lambda: None).sizes(range(50)))) == 50
