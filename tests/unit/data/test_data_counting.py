"""What is counted of micro-batches, packed or not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mindspeed_mm.data.adapter import DefaultAdapter
from mindspeed_mm.data.loading.counting import BatchCounts, CountingIterator, drop_host_fields

PACKED: dict[str, Any] = {
    "input_ids": torch.zeros(2, 8, dtype=torch.int64),
    "labels": torch.tensor([[-100, 5, -100, 6, 7, -100, -100, -100], [-100, 5, 6, 7, -100, -100, -100, -100]]),
    "documents": torch.tensor([[1, 1, 2, 2, 2, 3, 3, 0], [1, 1, 1, 1, 0, 0, 0, 0]]),
    "pixel_values": torch.zeros(12, 4),
    "image_grid_thw": torch.tensor([[1, 2, 2], [1, 2, 4]]),
    "pixel_values_videos": torch.zeros(8, 4),
    "video_grid_thw": torch.tensor([[2, 2, 2]]),
    "num_rows": 3,
    "row_ids": torch.tensor([7, 2, -1, 9]),
    "rows_left_out": 2,
}


def count(*batches: dict[str, Any]) -> BatchCounts:
    iterator = CountingIterator(iter(batches), 1, DefaultAdapter())
    for _ in batches:
        next(iterator)
    return iterator.take()


def test_samples_of_packed_rows_count_one_by_one() -> None:
    counts = count(PACKED)
    assert (counts.rows, counts.tokens, counts.positions, counts.targets) == (3, 11, 16, 6)
    assert counts.lengths == [2, 3, 2, 4]
    assert (counts.media["image"], counts.media["video"]) == (2, 1)
    assert (counts.row_ids, counts.rows_left_out) == ([7, 2, 9], 2)


def test_padded_rows_count_by_their_mask() -> None:
    mask = (PACKED["documents"] > 0).long()
    plain = {key: value for key, value in PACKED.items() if key not in ("documents", "row_ids")}
    counts = count({**plain, "attention_mask": mask}, {**plain, "attention_mask": mask, "row_ids": [4]})
    assert (counts.tokens, counts.lengths) == (22, [7, 4, 7, 4])
    assert counts.row_ids == [4]
    assert count({**plain, "attention_mask": mask}).row_ids is None


def test_a_row_without_padding_or_samples_beside_it() -> None:
    whole = {"input_ids": torch.zeros(1, 4), "documents": torch.ones(1, 4, dtype=torch.int64)}
    assert count(whole).lengths == [4]
    assert count({**whole, "documents": torch.zeros(1, 4, dtype=torch.int64)}).tokens == 0


def test_the_source_begins_once_with_start_or_the_first_batch() -> None:
    begun = []

    class Source:
        def __iter__(self) -> Iterator[dict[str, Any]]:
            begun.append(len(begun))
            return iter([PACKED, PACKED])

    for begin in (CountingIterator.start, next):
        begun.clear()
        iterator = CountingIterator(Source(), 1)
        assert begun == []
        begin(iterator)
        iterator.start()
        next(iterator)
        assert begun == [0]
        assert iterator.take().rows == (3 if begin is CountingIterator.start else 6)


@pytest.mark.parametrize("field", ["num_rows", "row_ids", "rows_left_out"])
def test_no_model_sees_what_is_only_counted(field: str) -> None:
    batch = dict(PACKED)
    drop_host_fields(batch)
    assert field not in batch and "documents" in batch
