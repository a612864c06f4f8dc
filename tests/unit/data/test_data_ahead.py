"""Global batches planned ahead by a process: the same as without, resumed anywhere, and gone when nobody needs it."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mindspeed_mm.data import build_mm_dataloader, build_mm_dataset
from mindspeed_mm.data.loading.sampler import PlannedBatches
from mindspeed_mm.data.media import media_reader
from mindspeed_mm.data.media.media import SampleSize
from mindspeed_mm.data.plan import ahead
from mindspeed_mm.data.plan.ahead import AheadPlans
from mindspeed_mm.data.plan.fixed_plan import Balance, FixedPlanner
from mindspeed_mm.data.plan.grouping import Grouping
from mindspeed_mm.data.plan.measuring import Measurer
from mindspeed_mm.data.plan.order import FixedOrder, StreamOrder
from mindspeed_mm.data.plan.pack_plan import PackPlanner
from mindspeed_mm.data.plan.plan import BatchLayout, Planner
from mindspeed_mm.utils.errors import BadSample, DataError
from tests.unit.data.data_rows import flat, talk
from tests.unit.data.fake_data import FakeRows, long_tail

LENGTHS: list[Any] = [*long_tail(60, 1000), [600, 600, 7], 0, [400, 0, 2]]


def planner(kind: str, processes: int, dataset: FakeRows | None = None, streamed: bool = False) -> Planner:
    dataset = dataset or FakeRows(LENGTHS, 1000, streamed=streamed)
    order: Any = StreamOrder(dataset.has_row, 16) if streamed else FixedOrder(len(dataset))
    measurer = Measurer(dataset, processes, lambda: order.num_rows)
    layout = BatchLayout(2, 8, 2)
    if kind == "packs":
        return PackPlanner(order, layout, 1000, measurer)
    grouping = Grouping("alike") if kind == "grouped" else None
    return FixedPlanner(order, layout, False, measurer, grouping, Balance(ranks=True))


def taken(batches: PlannedBatches, count: int) -> list[tuple[Any, Any, Any]]:
    """(rows, state, rows left out) of the next global batches, each of which is finished when it has been taken."""
    found = []
    drawn = iter(batches)
    for _ in range(count):
        micro_batches = list(itertools.islice(drawn, batches.planner.layout.micro_batches))
        left_out = batches.finish_batch()
        found.append((micro_batches, batches.state, left_out))
    batches.close()
    return found


@pytest.mark.parametrize(
    ("kind", "streamed"), [("packs", False), ("packs", True), ("grouped", False), ("balanced", True)]
)
def test_plans_are_the_same_and_resume_after_each_global_batch(kind: str, streamed: bool) -> None:
    """The state is that of what has been taken, however far a process has planned."""
    whole = taken(PlannedBatches(planner(kind, 0, streamed=streamed), 1), 12)
    made = PlannedBatches(planner(kind, 1, streamed=streamed), 1)
    assert taken(made, 12) == whole
    if streamed:
        assert made.planner.order.num_rows == len(LENGTHS)
    for stop, processes in ((1, 1), (7, 2)):
        again = PlannedBatches(planner(kind, processes, streamed=streamed), 1)
        again.go_to(json.loads(json.dumps(whole[stop - 1][1])))
        assert taken(again, 2) == whole[stop : stop + 2]
        assert again.state == whole[stop + 1][1]  # the next iter() goes on there
        assert taken(again, 1) == whole[stop + 2 : stop + 3]


class Slow(FakeRows):
    def measure(self, index: int) -> list[SampleSize]:
        time.sleep(0.002)
        return super().measure(index)


def test_a_step_doesnt_wait_for_its_plan() -> None:
    """Rows are measured and planned while the run trains."""
    plans = AheadPlans(planner("packs", 1, Slow(long_tail(5000, 1000, median=100.0), 1000)), 0)
    next(plans)
    time.sleep(1.0)
    started = time.perf_counter()
    for _ in range(3):
        next(plans)
    assert time.perf_counter() - started < 0.1  # about 0.5 s of measuring
    plans.close()


class Torn(FakeRows):
    def measure(self, index: int) -> list[SampleSize]:
        if index == 70:
            raise BadSample("rows.json, row 71: torn", "torn")
        if index == 71:
            raise ValueError("no such thing")
        return super().measure(index)


class Dying(FakeRows):
    def measure(self, index: int) -> list[SampleSize]:
        if index == 70:
            os._exit(1)
        return super().measure(index)


@pytest.mark.parametrize(
    ("dataset", "first", "words"),
    [
        (Torn([300] * 100), 0, ["rows.json, row 71: torn"]),
        (Torn([300] * 100), 71, ["planning: ValueError: no such thing", "Traceback"]),
        (Dying([300] * 100), 0, ["a data worker died"]),
    ],
)
@pytest.mark.parametrize("processes", [1, 2])
def test_what_goes_wrong_ends_the_run_with_its_row(
    dataset: FakeRows, first: int, words: list[str], processes: int
) -> None:
    order = FixedOrder(100, shuffle=False)
    made = PackPlanner(order, BatchLayout(1, 2), 1000, Measurer(dataset, processes, lambda: 100))
    made.go_to({"position": first})
    plans = AheadPlans(made, 0)
    with pytest.raises(DataError) as raised:
        for _ in range(20):
            next(plans)
    plans.close()
    assert all(word in str(raised.value) for word in words), str(raised.value)


def test_processes_end_when_nobody_needs_them() -> None:
    before = set(multiprocessing.active_children())
    plans = AheadPlans(planner("packs", 3), 0)
    next(plans)
    started = set(multiprocessing.active_children()) - before
    assert len(started) >= 1  # those that have nothing more to measure have ended
    plans.close()
    assert not set(multiprocessing.active_children()) - before
    with pytest.raises(DataError):
        next(plans)


def _train(described: dict[str, Any], rank: int, ranks: int, seen: Path) -> None:
    dataset = build_mm_dataset(described, max_length=200)
    loader = build_mm_dataloader(
        dataset, None, micro_batch_size=1, global_batch_size=ranks, dp_rank=rank, dp_size=ranks, num_workers=1
    )
    rows = [batch["row_ids"].tolist() for batch in itertools.islice(loader, 8)]
    seen.write_text(json.dumps(rows))
    loader.close()


@pytest.mark.parametrize("ranks", [2, 4])
def test_headers_are_measured_once_a_node(
    tmp_path: Path, param: Any, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank plans all packs, with sizes that one of them has measured; workers that decode look for themselves."""
    count = 48
    for number in range(count):
        Image.new("RGB", (28 * (1 + number % 4), 28)).save(tmp_path / f"{number}.png")
    rows = [talk("<image>what", "word " * (1 + number % 7), images=[f"{number}.png"]) for number in range(count)]
    described = param(rows, packing=True)
    noted, look, plan = tmp_path / "noted", media_reader.image_size, ahead._plan

    def noting(file: Any, most: int) -> tuple[int, int]:
        with open(noted, "a") as out:
            out.write(f"{Path(file.path).name}\n")
        return look(file, most)

    def planning(*arguments: Any) -> None:  # in the planning process alone
        media_reader.image_size = noting
        plan(*arguments)

    monkeypatch.setattr(ahead, "_plan", planning)
    fork = multiprocessing.get_context("fork")
    holder = Measurer(build_mm_dataset(described, max_length=200), 0, lambda: count)
    assert holder.table.unknown([0])  # sizes are there as long as one process uses them
    processes = [
        fork.Process(target=_train, args=(described, rank, ranks, tmp_path / f"seen{rank}")) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * ranks
    assert sorted(noted.read_text().split()) == sorted(f"{number}.png" for number in range(count))
    loader = build_mm_dataloader(
        build_mm_dataset(described, max_length=200), None, micro_batch_size=ranks, global_batch_size=ranks
    )
    for number, batch in enumerate(itertools.islice(loader, 8)):
        parts = [json.loads((tmp_path / f"seen{rank}").read_text())[number] for rank in range(ranks)]
        assert sorted(flat(parts)) == sorted(batch["row_ids"].tolist())
