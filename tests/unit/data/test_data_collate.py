"""Packed micro-batches: several samples a row, told apart by `documents`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from mindspeed_mm.configs.data_config import CollateParam
from mindspeed_mm.data.adapter import DefaultAdapter
from mindspeed_mm.data.loading.collate import NOTES, Collator
from mindspeed_mm.data.loading.rows import BatchRows
from mindspeed_mm.data.loading.user_rows import DrawnBatch
from mindspeed_mm.data.notes import Note
from tests.unit.data.fake_data import FakeRows


def sample(first: int, length: int, **more: Any) -> dict[str, Any]:
    ids = torch.arange(first, first + length)
    return {"input_ids": ids, "labels": ids.clone(), **more}


FILLER = {"input_ids": torch.tensor([9, 9]), "labels": torch.tensor([-100, -100]), "num_rows": torch.tensor(0)}


def pack(*rows: list[dict[str, Any]], **param: Any) -> dict[str, Any]:
    return Collator(DefaultAdapter(), CollateParam(**param), SimpleNamespace(pad_token_id=9)).pack(rows)


def test_samples_of_a_row_are_numbered_and_padding_is_0() -> None:
    batch = pack([sample(10, 3, row_id=4), sample(20, 2, row_id=1)], [sample(30, 1, row_id=7)], pad_to_multiple_of=4)
    assert batch["input_ids"].tolist() == [[10, 11, 12, 20, 21, 9, 9, 9], [30] + [9] * 7]
    assert batch["documents"].tolist() == [[1, 1, 1, 2, 2, 0, 0, 0], [1] + [0] * 7]
    # the first token of a sample is no target: in the row it follows the last one of another sample
    assert batch["labels"].tolist() == [[-100, 11, 12, -100, 21, -100, -100, -100], [-100] * 8]
    assert "attention_mask" not in batch
    assert (batch["num_rows"], batch["row_ids"].tolist(), batch["rows_left_out"]) == (3, [4, 1, 7], 0)
    assert all(batch[key].dtype == torch.int64 for key in ("input_ids", "documents", "labels", "row_ids"))


def test_the_samples_themselves_stay_as_they_are() -> None:
    one = sample(10, 3)
    pack([one])
    assert one["labels"].tolist() == [10, 11, 12]


def test_media_follow_the_samples_and_types_their_tokens() -> None:
    def media(value: float, patches: int) -> dict[str, torch.Tensor]:
        grid = torch.tensor([[1, 1, patches]])
        return {"pixel_values": torch.full((patches, 2), value), "image_grid_thw": grid}

    types = torch.tensor([1, 0])
    batch = pack(
        [sample(1, 2, mm_token_type_ids=types, **media(1.0, 2)), sample(3, 2)], [sample(5, 2, **media(2.0, 1))]
    )
    assert batch["pixel_values"][:, 0].tolist() == [1, 1, 2]
    assert batch["image_grid_thw"].tolist() == [[1, 1, 2], [1, 1, 1]]
    assert batch["mm_token_type_ids"].tolist() == [[1, 0, 0, 0], [0, 0, 0, 0]]


def test_fillers_among_samples_are_left_out_and_a_row_of_them_is_one() -> None:
    bad = {**FILLER, "row_id": 5, "note": "row 5: torn", "fault": "image can't be decoded"}
    batch = pack([bad, sample(1, 3, row_id=0), bad], [bad, bad])
    assert batch["input_ids"].tolist() == [[1, 2, 3], [9, 9, 9]]
    assert batch["documents"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert set(batch["labels"][1].tolist()) == {-100}
    assert (batch["num_rows"], batch["row_ids"].tolist(), batch["rows_left_out"]) == (1, [0, -1], 4)
    assert batch[NOTES] == [Note("row 5: torn", "image can't be decoded")] * 4


def test_one_sample_a_row_says_the_same_on_the_host() -> None:
    collate = Collator(DefaultAdapter(), CollateParam(), SimpleNamespace(pad_token_id=9))
    batch = collate([sample(1, 2, row_id=3), {**FILLER, "row_id": 8, "note": "n", "fault": "f"}])
    assert (batch["num_rows"], batch["row_ids"].tolist(), batch["rows_left_out"]) == (1, [3, -1], 1)
    assert "documents" not in batch and batch["attention_mask"].tolist() == [[1, 1], [1, 1]]


def rows(dataset: FakeRows, capacity: int, *planned: list[tuple[int, int]]) -> dict[str, Any]:
    collate = Collator(dataset.adapter, CollateParam(), dataset)
    return BatchRows(dataset, collate, capacity).__getitems__(DrawnBatch(planned, 0, 0))


def test_a_pack_is_made_of_the_planned_pieces() -> None:
    batch = rows(FakeRows([4, [3, 2]]), 10, [(0, 0), (1, 1)])
    assert batch["input_ids"].tolist() == [[1] * 4 + [2] * 2]
    assert batch["labels"].tolist() == [[-100, 1, 1, 1, -100, 1002]]


def test_media_longer_than_foreseen_take_the_room_of_those_after_them() -> None:
    """The pack keeps to its limit; a sample that doesn't fit any more is left out, by name, and counted."""
    batch = rows(FakeRows([4, 3, 3], grows={1: 3}), 10, [(0, 0), (1, 0), (2, 0)], [(0, 0)])
    assert batch["documents"].tolist() == [[1, 1, 1, 1, 2, 2, 2, 2, 2, 2], [1] * 4 + [0] * 6]
    alone = rows(FakeRows([8, 3, 1], grows={1: 3}), 10, [(0, 0), (1, 0), (2, 0)])
    assert alone["row_ids"].tolist() == [0, 2]
    (note,) = alone[NOTES]
    assert note == Note("fake row 1: 6 tokens, and its pack has room for 2", "no room in its pack")
    assert alone["rows_left_out"] == 1
