"""The loader with packs, balance and streams: what is handed out, its state, and what it refuses."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from mindspeed_mm.data import build_mm_dataloader, build_mm_dataset
from mindspeed_mm.data.loading.loader import MMDataLoader
from mindspeed_mm.data.notes import Note, NoteCounter
from mindspeed_mm.data.plan.batching import Batching
from mindspeed_mm.data.plan.fixed_plan import Balance
from mindspeed_mm.utils.errors import ConfigError
from tests.unit.data.data_rows import flat, talk
from tests.unit.data.fake_data import FakeRows, long_tail

CAPACITY = 100
LENGTHS = long_tail(120, CAPACITY, median=25.0)


def packed(rows: Any = LENGTHS, workers: int = 0, streamed: bool = False, **sizes: Any) -> MMDataLoader:
    dataset = FakeRows(rows, CAPACITY, streamed=streamed, packing=True)
    settings = {"micro_batch_size": 2, "global_batch_size": 8, **sizes}
    return build_mm_dataloader(dataset, sizes.pop("param", None), num_workers=workers, **settings)


def ids(batches: Any, count: int) -> list[list[int]]:
    """Rows of the next micro-batches."""
    return [batch["row_ids"].tolist() for batch in itertools.islice(batches, count)]


@pytest.mark.parametrize("workers", [0, 2])
def test_packs_come_as_planned(workers: int) -> None:
    loader = packed(workers=workers)
    for batch in itertools.islice(loader, 12):
        assert batch["input_ids"].shape[0] == 2 and batch["input_ids"].shape[1] <= CAPACITY
        assert (batch["documents"].max(1).values.sum() == batch["num_rows"]) and batch["rows_left_out"] == 0
        shown = [document[document > 0].unique(return_counts=True)[1].tolist() for document in batch["documents"]]
        assert flat(shown) == [LENGTHS[row] for row in batch["row_ids"]]
    assert loader.consumed_samples == 24
    loader.close()


@pytest.mark.parametrize("streamed", [False, True])
def test_state_moves_with_finished_global_batches_and_is_all_of_it(streamed: bool) -> None:
    """K05: written half-way through a global batch, after workers have read ahead; read with others of everything."""
    options = {"streamed": streamed}
    whole = ids(packed(**options), 60)  # four micro-batches a global batch
    for stop, workers in ((4, 0), (10, 2), (34, 1)):
        loader = packed(workers=workers, **options)
        assert ids(loader, stop) == whole[:stop]
        state = json.loads(json.dumps(loader.state_dict()))
        assert state["consumed_samples"] == stop // 4 * 8
        loader.close()
        for resumed_workers in (0, 2):
            again = packed(workers=resumed_workers, **options)
            again.load_state_dict(state)
            assert again.state_dict() == {**again.state_dict(), **state, "num_rows": again.num_rows}
            assert ids(again, 20) == whole[stop // 4 * 4 : stop // 4 * 4 + 20]
            assert again.consumed_samples == (stop // 4 + 5) * 8
            again.close()
        ranks = [packed(micro_batch_size=1, dp_rank=rank, dp_size=4, **options) for rank in range(4)]
        for rank in ranks:
            rank.load_state_dict(state)
        for step in range(3):
            taken = sorted(flat(flat(ids(rank, 2) for rank in ranks)))
            first = stop // 4 * 4 + step * 4
            assert taken == sorted(flat(whole[first : first + 4]))
            for rank in ranks:  # the next iter() goes on where the last one was
                assert rank.consumed_samples == (stop // 4 + step + 1) * 8


def test_rows_left_out_are_named_and_counted_once(said: list[str]) -> None:
    """Every rank finds them while it plans; one counts them."""
    lengths = [0 if row in (3, 40) else 30 for row in range(400)]
    for rank in (0, 1):
        loader = packed(lengths, micro_batch_size=4, dp_rank=rank, dp_size=2)
        batches = list(itertools.islice(loader, 16))
        assert sum(batch["rows_left_out"] for batch in batches) == (2 if rank == 0 else 0)
    assert any("rows left out, on this rank so far" in line and "fake row" in line for line in said)


def test_notes_are_said_when_their_number_has_doubled(said: list[str]) -> None:
    counter = NoteCounter()
    for number in range(9):
        counter.add([Note(f"row {number}", "torn" if number % 2 else "empty")])
        counter.add([])
    assert [line.partition("so far: ")[2] for line in said] == [
        "1 (1 × empty; the last: row 0)",
        "2 (1 × empty, 1 × torn; the last: row 1)",
        "4 (2 × empty, 2 × torn; the last: row 3)",
        "8 (4 × empty, 4 × torn; the last: row 7)",
    ]


def test_there_is_no_epoch_length_with_packs_or_streams() -> None:
    assert packed().global_batches_per_epoch is None and packed().num_rows == 120
    stream = build_mm_dataloader(FakeRows([1] * 8, streamed=True), None, micro_batch_size=1, global_batch_size=2)
    assert stream.global_batches_per_epoch is None and stream.num_rows is None
    assert len({row for (row,) in ids(stream, 8)}) == 8
    ids(stream, 2)
    assert (stream.global_batches_per_epoch, stream.num_rows) == (4, 8)


def test_evaluation_is_never_packed_or_balanced() -> None:
    dataset = FakeRows([5, 9, 3], CAPACITY, packing=True)
    batching = Batching(Balance(ranks=True), dynamic_length=50)
    loader = build_mm_dataloader(dataset, None, micro_batch_size=1, global_batch_size=2, train=False, batching=batching)
    for _ in range(2):
        batches = list(itertools.islice(loader, 4))
        assert [batch["row_ids"].tolist() for batch in batches] == [[0], [1], [2], [-1]]
        assert all("attention_mask" in batch and "documents" not in batch for batch in batches)


def test_dynamic_batching_packs_without_data_json() -> None:
    dataset = FakeRows(LENGTHS)
    loader = build_mm_dataloader(
        dataset, None, micro_batch_size=1, global_batch_size=1, batching=Batching(dynamic_length=60, least_waiting=50)
    )
    shapes = [tuple(batch["documents"].shape) for batch in itertools.islice(loader, 10)]
    assert all(rows == 1 and length <= 60 for rows, length in shapes) and len(dataset.measured) >= 50


@pytest.mark.parametrize("workers", [0, 1])
def test_balance_changes_who_takes_a_row_and_nothing_else(workers: int) -> None:
    settings: dict[str, Any] = {"micro_batch_size": 1, "global_batch_size": 8, "dp_size": 2, "num_workers": workers}
    taken = []
    for balance in (Balance(), Balance(ranks=True)):
        loaders = [
            build_mm_dataloader(FakeRows(LENGTHS), None, dp_rank=rank, **settings, batching=Batching(balance))
            for rank in range(2)
        ]
        taken.append([ids(loader, 12) for loader in loaders])
        for loader in loaders:
            loader.close()
    for step in range(3):
        plain, balanced = (sorted(flat(flat(rank[step * 4 : step * 4 + 4] for rank in kind))) for kind in taken)
        assert plain == balanced
    assert taken[0] != taken[1]
    # both ranks take rows of like length in each micro-step
    gaps = [
        sum(abs(LENGTHS[first] - LENGTHS[second]) for (first,), (second,) in zip(*kind, strict=True)) for kind in taken
    ]
    assert gaps[1] < 0.6 * gaps[0]


class Own(Dataset):
    """A data set of the user's own that knows nothing of sizes."""

    max_length = 100

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.ones(2), "labels": torch.ones(2)}


class Stream:
    def __len__(self) -> int:
        raise TypeError


@pytest.mark.parametrize(
    ("dataset", "param", "batching", "words"),
    [
        (Own(), None, Batching(dynamic_length=8), ["--use-txt-dynamic-batching", "measure(index)", "Own"]),
        (Own(), None, Batching(Balance(ranks=True)), ["--use-data-balance", "measure(index)"]),
        (Own(), None, Batching(Balance(micro_batches=True)), ["--use-image-mbs-data-balance", "turn it off"]),
        (Own(), {"sampler_type": "LengthGroupedSampler"}, None, ["sampler_type LengthGroupedSampler", "measure"]),
        (FakeRows([1], packing=True), None, None, ["basic_parameters.packing", "--seq-length"]),
        (Stream(), None, None, ["Stream", "has_row(index)"]),
    ],
)
def test_what_cannot_be_is_refused(dataset: Any, param: Any, batching: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        build_mm_dataloader(dataset, param, micro_batch_size=1, global_batch_size=1, batching=batching)
    assert all(word in str(raised.value) for word in words), str(raised.value)


def test_packing_and_a_collate_fn_of_the_data_sets_own() -> None:
    dataset = FakeRows([1], 10, packing=True)
    dataset.collate_fn = len  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"packing.*collate_fn"):
        build_mm_dataloader(dataset, None, micro_batch_size=1, global_batch_size=1)


def test_samplers_that_group(said: list[str]) -> None:
    def lengths(sampler: str, **more: Any) -> list[int]:
        loader = build_mm_dataloader(
            FakeRows(LENGTHS, patches=[row % 7 for row in range(120)]),
            {"sampler_type": sampler, **more},
            micro_batch_size=4,
            global_batch_size=4,
        )
        return [max(LENGTHS[i] for i in batch) - min(LENGTHS[i] for i in batch) for batch in ids(loader, 30)]

    assert sum(lengths("LengthGroupedSampler")) < 0.3 * sum(lengths("BaseRandomBatchSampler"))
    assert lengths("BucketBatchSampler") != lengths("BucketBatchSampler", priority_mode="data_reordering_img")
    lengths("BaseRandomBatchSampler", priority_mode="data_bucketing_img")
    assert any("priority_mode has no effect here" in line for line in said)


def test_checkpoints_from_before_and_with_packing_switched(said: list[str]) -> None:
    """An old one has consumed samples only; one without packs is taken at its row, one with packs after its rows."""
    loader = packed()
    loader.load_state_dict({"consumed_samples": 16})
    assert loader.state_dict()["packing"]["next"] == 16 and loader.consumed_samples == 16
    assert any("written without packing" in line for line in said)
    ids(loader, 4)
    state = loader.state_dict()
    plain = build_mm_dataloader(FakeRows(LENGTHS), None, micro_batch_size=2, global_batch_size=8)
    plain.load_state_dict(state)
    assert any("written with packing and this run is without" in line for line in said)
    assert plain.consumed_samples == 24 == state["consumed_samples"]
    first = -(-state["packing"]["next"] // 8) * 8 % 120
    assert flat(ids(plain, 4)) == plain.sampler.planner.order.rows_at(list(range(first, first + 8)))
    assert plain.consumed_samples == 32
    again = build_mm_dataloader(FakeRows(LENGTHS), None, micro_batch_size=2, global_batch_size=8)
    again.load_state_dict(plain.state_dict())
    assert ids(again, 8) == ids(plain, 8)


@pytest.mark.parametrize("workers", [0, 1])
def test_real_rows_with_images_in_packs(param: Any, images: list[str], workers: int) -> None:
    """From data.json to a batch: documents are the samples, media stand in their order."""
    rows = [talk("<image>" * (i % 3) + f"row {i}", "word " * (i + 1), images=images[: i % 3]) for i in range(6)]
    dataset = build_mm_dataset(param(rows, packing=True), max_length=200)
    loader = build_mm_dataloader(dataset, None, micro_batch_size=2, global_batch_size=2, num_workers=workers)
    seen = set()
    for batch in itertools.islice(loader, 4):
        samples = iter(dataset[row] for row in batch["row_ids"].tolist())
        grids = []
        for line, documents in zip(batch["input_ids"], batch["documents"]):
            for number in range(1, int(documents.max()) + 1):
                sample = next(samples)
                assert line[documents == number].tolist() == sample["input_ids"].tolist()
                grids += sample["image_grid_thw"].tolist() if "image_grid_thw" in sample else []
        assert batch.get("image_grid_thw", torch.empty(0, 3)).tolist() == grids
        seen |= set(batch["row_ids"].tolist())
    assert seen == set(range(6))
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("packing", [False, True])
def test_real_rows_in_a_stream(tmp_path: Any, param: Any, workers: int, packing: bool) -> None:
    """Found on the way by the plan and by each worker; every row once an epoch, and resumed in the middle."""
    rows = [talk(f"row {i}", "word " * (i % 5 + 1)) for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    described = param("rows.jsonl", streaming=True, buffer_size=6, packing=packing)

    def loader() -> MMDataLoader:
        dataset = build_mm_dataset(described, max_length=100)
        return build_mm_dataloader(dataset, None, micro_batch_size=2, global_batch_size=4, num_workers=workers)

    whole = loader()
    taken = ids(whole, 60)
    whole.close()
    rows_taken = flat(taken)
    if not packing:
        assert sorted(rows_taken[:40]) == sorted(rows_taken[40:80]) == list(range(40))
        assert rows_taken[:40] != rows_taken[40:80]
    assert set(rows_taken) == set(range(40))
    first = loader()
    assert ids(first, 22) == taken[:22]
    state = json.loads(json.dumps(first.state_dict()))
    first.close()
    again = loader()
    again.load_state_dict(state)
    assert ids(again, 20) == taken[22:42]
    again.close()
