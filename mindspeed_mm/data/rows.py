"""The data set as the loader's workers see it: planned micro-batches in, finished ones out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from mindspeed_mm.data.collate import Collator
from mindspeed_mm.data.encode import IGNORE_INDEX
from mindspeed_mm.data.plan import FILLER, PlannedRow
from mindspeed_mm.data.workers import Failure
from mindspeed_mm.utils.errors import MMError


class BatchRows(Dataset):
    """Micro-batches of a data set.

    Args:
        dataset: Map-style; with packs it has `get(row, piece, room)` and `where(row)`; where samples name their epoch
            `get(row, bucket, epoch)`.
        collate: Samples to a micro-batch; with packs a `Collator`.
        capacity: Tokens of a pack; None: one sample a row.
    """

    def __init__(self, dataset: Any, collate: Any, capacity: int | None = None) -> None:
        self._dataset = dataset
        self._collate = collate
        self._capacity = capacity

    def __getitems__(self, rows: Sequence[PlannedRow]) -> Any:
        """Return a micro-batch, or the `Failure` that one of its rows caused."""
        try:
            if self._capacity is not None:
                return self._collate.pack([self._pack(row, self._capacity) for row in rows])
            return self._collate([self._row(*piece) for (piece,) in rows])
        except MMError as error:
            return Failure(str(error))

    def _row(self, index: int, piece: int = 0, epoch: int | None = None) -> Any:
        if epoch is not None:
            return self._dataset.get(index, piece, epoch)
        if index != FILLER or getattr(self._dataset, "has_fillers", False):
            sample = self._dataset[index]
            return {**sample, "row_id": index} if isinstance(self._collate, Collator) else sample
        sample = dict(self._dataset[0])  # a data set of the user's own: its first row, trained on nothing
        return {
            **sample,
            "labels": torch.full_like(sample["labels"], IGNORE_INDEX),
            "num_rows": torch.tensor(0),
            **({"row_id": index} if isinstance(self._collate, Collator) else {}),
        }

    def _pack(self, row: PlannedRow, capacity: int) -> list[Any]:
        """The samples of a pack.

        Media that took more tokens than foreseen leave less room to those after them: these are cut, or left out.
        """
        samples, used = [], 0
        for index, piece in row:
            room = capacity - used
            sample = {**self._dataset.get(index, piece, room), "row_id": index}
            if (length := len(sample["input_ids"])) > room:
                message = f"{self._dataset.where(index)}: {length} tokens, and its pack has room for {room}"
                sample = {**self._dataset[FILLER], "row_id": FILLER, "note": message, "fault": "no room in its pack"}
            if int(sample.get("num_rows", 1)):
                used += length
            samples.append(sample)
        return samples
