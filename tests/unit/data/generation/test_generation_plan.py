"""The plan of batches by shape: the same for any ranks, micro-batches and resumes; every row once an epoch."""

from __future__ import annotations

import itertools
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from mindspeed_mm.configs.generation_data import GenerationDataloaderParam
from mindspeed_mm.data import build_mm_dataloader
from mindspeed_mm.data.generation.buckets import Bucket, BucketTable
from mindspeed_mm.data.generation.collate import collate
from mindspeed_mm.data.loading.counting import CountingIterator, drop_host_fields
from mindspeed_mm.data.media.media import SampleSize
from mindspeed_mm.data.plan.batching import Batching, build_planner
from mindspeed_mm.data.plan.plan import FILLER, BatchLayout
from mindspeed_mm.utils.sample_random import sample_key

TABLE = BucketTable([Bucket(9, 32, 64), Bucket(9, 64, 32), Bucket(5, 32, 64), Bucket(1, 32, 64)])
NUM_ROWS, BAD = 67, (3, 40)


class Shaped(Dataset):
    """Rows with buckets, without files; row 3 and 40 can't be used."""

    names_epochs = True
    has_fillers = True

    def __init__(self, num_rows: int = NUM_ROWS, table: BucketTable = TABLE) -> None:
        self.num_rows, self.shapes = num_rows, table

    def __len__(self) -> int:
        return self.num_rows

    def own(self, index: int) -> int:
        return (index * 7 + index // 5) % 11 % len(self.shapes)

    def measure(self, index: int) -> list[SampleSize]:
        if index in BAD:
            return [SampleSize(0, fault="bad")]
        return [SampleSize(10, bucket=self.own(index))]

    def get(self, index: int, piece: int = 0, epoch: int = 0) -> dict[str, Any]:
        real = index != FILLER and index not in BAD
        row = {"row_id": index if real else FILLER, "sample_key": sample_key(1, index, epoch) if real else 0}
        shape = self.shapes[piece]
        return {"video": torch.zeros(3, *shape), "caption": str(index), "num_tokens": shape[0] * 8, **row}

    collate_fn = staticmethod(collate)


def plan(layout: BatchLayout, batches: int, state: Any = None, **options: Any) -> tuple[list[Any], Any]:
    """Global batches as sorted (row, bucket, epoch), and the state after them."""
    dataset = options.pop("dataset", None) or Shaped()
    param = GenerationDataloaderParam(**options.pop("param", {}))
    planner = build_planner(dataset, layout, param, Batching(), train=options.pop("train", True), seed=5)
    if state is not None:
        planner.go_to(state)
    found, after = [], None
    for batch in itertools.islice(planner.batches(), batches):
        for rank in batch.micro_batches:
            for micro in rank:
                assert len({piece[1] for (piece,) in micro}) == 1
        found.append(sorted(piece for (piece,) in batch.rows))
        after = batch.state
    return found, after


@pytest.mark.parametrize(
    "layout", [BatchLayout(1, 8), BatchLayout(8, 8), BatchLayout(2, 8, 2), BatchLayout(1, 8, 4), BatchLayout(2, 8, 4)]
)
def test_the_same_batches_for_any_layout(layout: BatchLayout) -> None:
    options: dict[str, Any] = {"param": {"drop_last": False}}
    assert plan(layout, 30, **options)[0] == plan(BatchLayout(1, 8), 30, **options)[0]


def test_every_row_once_an_epoch_in_batches_of_one_bucket() -> None:
    batches, _ = plan(BatchLayout(1, 8), 18, param={"drop_last": False})
    own = Shaped().own
    for epoch in (0, 1):
        of_epoch = batches[9 * epoch : 9 * epoch + 9]
        pieces = [piece for batch in of_epoch for piece in batch]
        assert Counter(piece[0] for piece in pieces) == {**dict.fromkeys(range(NUM_ROWS), 1), FILLER: 72 - NUM_ROWS}
        assert {piece[2] for piece in pieces} == {epoch}
        whole = 0
        for batch in of_epoch:
            (bucket,) = {piece[1] for piece in batch}
            rows = [row for row, _, _ in batch if row != FILLER and row not in BAD]
            assert all(TABLE[bucket].frames <= TABLE[own(row)].frames for row in rows)
            whole += {own(row) for row in rows} == {bucket} and len(rows) == 8
        assert whole >= 5
    assert batches[:9] != batches[9:]


@pytest.mark.parametrize("consumed", [1, 4, 9, 13])
def test_a_resume_goes_on(consumed: int) -> None:
    whole, _ = plan(BatchLayout(1, 8), 20, param={"drop_last": False})
    first, state = plan(BatchLayout(2, 8, 2), consumed, param={"drop_last": False})
    later, _ = plan(BatchLayout(1, 8, 4), 20 - consumed, state, param={"drop_last": False})
    assert first + later == whole


def test_drop_last_and_evaluation() -> None:
    batches, _ = plan(BatchLayout(1, 8), 8)
    assert sum(len(batch) for batch in batches) == 64 and FILLER not in {piece[0] for b in batches for piece in b}
    evaluated, _ = plan(BatchLayout(1, 8), 9, train=False)
    assert {piece[0] for batch in evaluated for piece in batch} == {FILLER, *range(NUM_ROWS)}
    assert all(len({piece[1] for piece in batch}) == 1 for batch in evaluated)


def test_one_bucket_is_not_measured() -> None:
    dataset = Shaped(table=BucketTable([TABLE[0]]))
    dataset.measure = None  # type: ignore[assignment]
    batches, _ = plan(BatchLayout(1, 8), 16, dataset=dataset)
    assert {piece[1:] for piece in batches[0]} == {(0, 0)} and {piece[1:] for piece in batches[8]} == {(0, 1)}


def loaded(batches: int, workers: int = 0, consumed: int = 0, **layout: int) -> tuple[Any, list[dict[str, Any]]]:
    loader = build_mm_dataloader(
        Shaped(),
        {"drop_last": False},
        global_batch_size=8,
        num_workers=workers,
        seed=5,
        consumed_samples=consumed,
        **layout,
    )
    found = list(itertools.islice(iter(loader), batches))
    loader.close()
    return loader, found


def test_the_loader_s_batches() -> None:
    """Keys name rows and epochs; two workers and two ranks see the same as one process."""
    _, alone = loaded(80, micro_batch_size=1)
    assert all(len({clip.shape for clip in batch["video"]}) == 1 for batch in alone)
    keys = [
        int(key) for batch in alone for key, row in zip(batch["sample_keys"], batch["row_ids"], strict=True) if row >= 0
    ]
    rows = [int(row) for batch in alone for row in batch["row_ids"] if row >= 0]
    assert keys[: NUM_ROWS - 2] == [sample_key(1, row, 0) for row in rows[: NUM_ROWS - 2]]
    assert keys[NUM_ROWS - 2 :] == [sample_key(1, row, 1) for row in rows[NUM_ROWS - 2 :]] and len(rows) > 70
    whole = [sorted(int(key) for batch in alone[i : i + 8] for key in batch["sample_keys"]) for i in range(0, 80, 8)]
    ranks = [loaded(20, workers=2, micro_batch_size=2, dp_rank=rank, dp_size=2)[1] for rank in (0, 1)]
    together = [
        sorted(int(key) for rank in ranks for batch in rank[i : i + 2] for key in batch["sample_keys"])
        for i in range(0, 20, 2)
    ]
    assert together == whole
    _, resumed = loaded(16, consumed=64, micro_batch_size=4)
    assert [sorted(int(k) for b in resumed[i : i + 2] for k in b["sample_keys"]) for i in (0, 2)] == whole[8:10]


def test_what_is_counted() -> None:
    loader, batches = loaded(9, micro_batch_size=8)
    counting = CountingIterator(iter(batches), 8)
    for _ in batches:
        next(counting)
    counts = counting.take()
    assert counts.rows == NUM_ROWS - 2 and sorted(counts.row_ids or []) == [r for r in range(NUM_ROWS) if r not in BAD]
    assert counts.tokens == counts.positions == sum(int(batch["num_tokens"]) for batch in batches)
    assert counts.media["video"] + counts.media["image"] == counts.rows and counts.media["image"] >= 8
    one = batches[0]
    rows = int(one["num_rows"])
    assert counts.lengths[:rows] == [one["num_tokens"] // rows] * rows
    host = SimpleNamespace(**one)
    drop_host_fields(one)
    assert not {"num_tokens", "num_rows", "row_ids", "rows_left_out"} & one.keys()
    assert host.sample_weights.dtype == torch.float32 and host.sample_keys.dtype == torch.int64
    assert "sample_weights" in one and loader.rows_per_epoch == 72
