"""Sizes of rows, found ahead of time."""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
import os
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path
from types import SimpleNamespace

import pytest

from mindspeed_mm.data.media.media import SampleSize
from mindspeed_mm.data.plan import measuring
from mindspeed_mm.data.plan.measuring import Measurer
from mindspeed_mm.data.plan.order import FixedOrder
from mindspeed_mm.data.plan.size_table import SizeTable
from mindspeed_mm.utils.errors import BadSample
from mindspeed_mm.utils.node_folder import NodeFolder
from tests.unit.data.fake_data import FakeRows, measurer, take


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_table_keeps_what_it_is_told(tmp_path: Path, is_shared: bool) -> None:
    folder = tmp_path if is_shared else None
    table, sizes = SizeTable(3000, folder), {
        5: [SampleSize(7)],
        0: [SampleSize(3, 4, 16)],
        5000: [SampleSize(2), SampleSize(9)],
        1: [SampleSize(0, fault="torn")],
        70: [SampleSize(1, 2**40, 2**50)],
        71: [SampleSize(8, bucket=0)],
        6: [],
    }  # fmt: skip
    for row, value in sizes.items():
        assert row not in table
        table[row] = value
        table[row] = value
    assert 2 not in table and 10**6 not in table and table.unknown([2, 5, 10**6, 2, 0]) == [2, 10**6]
    assert {row: table[row] for row in sizes} == sizes
    rows = [70, 5000, 6, 1, 5, 0, 5000]
    found = table.samples(rows)
    samples = [(place, piece, size) for place, row in enumerate(rows) for piece, size in enumerate(sizes[row])]
    expected = [(place, piece, size) for place, piece, size in samples if size.tokens]
    assert list(zip(found.places.tolist(), found.pieces.tolist())) == [(place, piece) for place, piece, _ in expected]
    columns = (found.tokens.tolist(), found.patches.tolist(), found.squared_patches.tolist())
    assert list(map(SampleSize, *columns)) == [size for *_, size in expected]
    assert list(found.faults) == [(3, "torn")] and not len(table.samples([]).tokens)
    other = SizeTable(3000, folder)
    assert {row: other[row] for row in sizes} == sizes if is_shared else 5 not in other


def test_sizes_come_in_the_order_of_the_rows() -> None:
    """Over several epochs, rows of several pieces and faults too."""
    lengths = [*range(1, 150), [4, 5], 0]
    dataset = FakeRows(lengths, patches=list(range(151)))
    order = FixedOrder(len(lengths))
    rows = take(order.rows_from(0), 500)
    found = take(measurer(dataset).sizes(order.rows_from(0)), 500)
    assert found == [dataset.measure(row) for row in rows]


def test_a_size_is_found_once_and_when_it_is_needed() -> None:
    dataset = FakeRows([3] * 40)
    sizes = measurer(dataset)
    take(sizes.sizes(range(7)), 5)
    assert dataset.measured == [0, 1, 2, 3, 4]
    take(sizes.sizes(FixedOrder(40).rows_from(0)), 130)
    assert sorted(dataset.measured) == list(range(40))
    dataset.measured.clear()
    take(sizes.sizes(FixedOrder(40).rows_from(77)), 50)
    assert dataset.measured == []


class Torn(FakeRows):
    def measure(self, index: int) -> list[SampleSize]:
        if index == 70:
            raise BadSample("rows.json, row 71: torn", "torn")
        return super().measure(index)


def test_an_error_comes_with_its_row() -> None:
    sizes = measurer(Torn([3] * 100)).sizes(range(100))
    assert len(list(itertools.islice(sizes, 70))) == 70
    with pytest.raises(BadSample, match=r"^rows.json, row 71: torn$"):
        next(sizes)


def test_the_end_of_the_rows_is_the_end() -> None:
    assert len(list(Measurer(FakeRows([1] * 50), 0, lambda: None).sizes(range(50)))) == 50


class Noted(FakeRows):
    """Writes each row that is measured, and its process, into a file; row 5 takes long in the first process."""

    notes: Path
    slow = 0.0

    def sizes_key(self) -> str:
        return hashlib.sha256(str(self.notes).encode()).hexdigest()

    def measure(self, index: int) -> list[SampleSize]:
        with open(self.notes, "a") as file:
            file.write(f"{index} {os.getpid()}\n")
        time.sleep(self.slow if index == 5 else 0.002)
        return super().measure(index)


def noted(folder: Path, rows: int = 200) -> Noted:
    dataset = Noted([3 + row for row in range(rows)])
    dataset.notes = folder / "notes"
    return dataset


def _read(dataset: Noted, count: int, together: Barrier | None = None) -> None:
    sizes = measurer(dataset)
    if together is not None:
        together.wait()
    found = list(sizes.sizes(range(count)))
    assert found == [[SampleSize(3 + row)] for row in range(count)]
    assert sizes.table.unknown(range(count)) == []


@pytest.mark.parametrize("processes", [2, 4])
def test_the_processes_of_a_node_measure_each_row_once(tmp_path: Path, processes: int) -> None:
    dataset, fork = noted(tmp_path), multiprocessing.get_context("fork")
    holder = measurer(dataset)  # sizes are there as long as one process uses them
    assert holder.table is not None
    together = fork.Barrier(processes)
    started = [fork.Process(target=_read, args=(dataset, 200, together)) for _ in range(processes)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    assert [process.exitcode for process in started] == [0] * processes
    lines = [line.split() for line in dataset.notes.read_text().splitlines()]
    assert sorted(int(row) for row, _ in lines) == list(range(200))
    assert len({process for _, process in lines}) == processes  # how many each measures is the machine's choice


def test_a_killed_process_leaves_its_row_to_those_that_wait(tmp_path: Path) -> None:
    dataset, fork = noted(tmp_path), multiprocessing.get_context("fork")
    holder = measurer(dataset)
    assert holder.table is not None
    dataset.slow = 60
    first = fork.Process(target=_read, args=(dataset, 6))
    first.start()
    while "5 " not in (dataset.notes.read_text() if dataset.notes.exists() else ""):
        time.sleep(0.01)
    dataset.slow = 0
    second = fork.Process(target=_read, args=(dataset, 200))
    second.start()
    while len(dataset.notes.read_text().splitlines()) < 30:  # others are measured in the meantime
        time.sleep(0.01)
    assert second.is_alive()
    first.kill()
    second.join(20)
    assert second.exitcode == 0
    rows = [int(line.split()[0]) for line in dataset.notes.read_text().splitlines()]
    assert sorted(rows) == sorted([*range(200), 5])


def test_who_waits_too_long_measures_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "LONGEST_WAIT", 0.2)
    dataset = noted(tmp_path)
    sizes = measurer(dataset)
    assert sizes.table is not None and sizes._folder is not None
    locks = multiprocessing.get_context("fork").Process(target=_hold, args=(sizes._folder, tmp_path / "held"))
    locks.start()
    while not (tmp_path / "held").exists():
        time.sleep(0.01)
    started = time.monotonic()
    assert next(sizes.sizes([5])) == [SampleSize(8)]
    assert time.monotonic() - started > 0.2
    locks.kill()


def _hold(folder: NodeFolder, held: Path) -> None:
    assert folder.try_lock(5)
    held.touch()
    time.sleep(60)


def test_the_folder_goes_with_its_last_user_and_what_a_killed_run_has_left_with_the_next(tmp_path: Path) -> None:
    first, second = NodeFolder.open("a-key-of-this-test"), NodeFolder.open("a-key-of-this-test")
    assert first is not None and second is not None and first.path == second.path
    (first.path / "0.sizes").touch()
    first.close()
    assert (second.path / "0.sizes").exists()
    second.close()
    assert not second.path.exists()
    left = second.path.with_name(second.path.name + "-left")
    left.mkdir()
    (left / "users").touch()
    third, fourth = NodeFolder.open(None), NodeFolder.open(None)
    assert third is not None and fourth is not None and third.path != fourth.path
    assert third.path.exists() and not left.exists()
    third.close()
    fourth.close()


def test_a_place_that_is_too_small_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    free = {first: 1000, second: 10**9}
    monkeypatch.setattr(NodeFolder, "_places", staticmethod(lambda: [first, second]))
    monkeypatch.setattr(os, "statvfs", lambda base: SimpleNamespace(f_bavail=free[base], f_frsize=1))
    small, large = NodeFolder.open("small", 500), NodeFolder.open("large", 501)
    free[first] = 0
    again = NodeFolder.open("small", 500)  # where it is already
    assert small is not None and large is not None and again is not None
    assert [folder.path.parent for folder in (small, large, again)] == [first, second, first]


def test_without_a_place_to_share_each_process_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setattr(NodeFolder, "_places", staticmethod(lambda: [tmp_path / "missing"]))
    dataset = FakeRows([3] * 40)
    assert list(measurer(dataset).sizes(range(40))) == [[SampleSize(3)]] * 40
    assert any("share nothing of what they find" in line for line in said)
