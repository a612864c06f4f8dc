"""The data set of the loader's workers: maps planned micro-batches to finished ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from mindspeed_mm.data.loading.collate import NOTES, Collator
from mindspeed_mm.data.loading.counting import COUNTS, HOST_FIELDS, counts_of
from mindspeed_mm.data.loading.user_rows import DrawnBatch
from mindspeed_mm.data.plan.plan import FILLER, PlannedRow
from mindspeed_mm.data.workers import WorkerFailure
from mindspeed_mm.utils.errors import MMError
from mindspeed_mm.utils.labels import IGNORE_INDEX
from mindspeed_mm.utils.sample_random import sample_key
from mindspeed_mm.utils.seeds import host_seeded, seed_host


class BatchRows(Dataset):
    """Micro-batches of a data set.

    Args:
        dataset: Map-style; with packs it has `get(row, piece, room)` and `where(row)`; where samples name their epoch
            `get(row, bucket, epoch)`.
        collate: Builds a micro-batch of samples; with packs a `Collator`.
        capacity: Tokens of a pack; None: one sample a row.
        seed: Seed of the run. As in `SeededRows`, global random states depend on a row's place alone; for data sets of
            this package, which don't draw from them, they are left unchanged.
    """

    def __init__(
        self, dataset: Dataset, collate: Callable[[Sequence[Any]], Any], capacity: int | None = None, seed: int = 0
    ) -> None:
        self._dataset = dataset
        self._collate = collate
        self._capacity = capacity
        self._seed = seed
        self._is_ours = getattr(dataset, "has_fillers", False)
        self.preparation: Callable[[dict[str, Any]], dict[str, Any]] | None = None
        """What is done with each micro-batch, after it has been counted; None: nothing."""

    def __getitems__(self, batch: DrawnBatch) -> Any:
        """Return a micro-batch of `PlannedRow`s, or the `WorkerFailure` of one of its rows."""
        try:
            if self._is_ours:
                return self._prepared(self._collated(batch.indices))
            with host_seeded(sample_key(self._seed, batch.place, -1)):
                return self._prepared(self._collated(batch.indices, batch.place))
        except MMError as error:
            return WorkerFailure(str(error))

    def _prepared(self, batch: Any) -> Any:
        if self.preparation is None:
            return batch
        counts = counts_of(batch, getattr(self._dataset, "adapter", None))
        kept = {name: batch.pop(name) for name in (*HOST_FIELDS, NOTES) if name in batch}
        return {**self.preparation(batch), **kept, COUNTS: counts}

    def _collated(self, rows: Sequence[PlannedRow], place: int | None = None) -> Any:
        samples = []
        for number, row in enumerate(rows):
            if place is not None:
                seed_host(sample_key(self._seed, place + number, 0))
            samples.append(self._row(*row[0]) if self._capacity is None else self._pack(row, self._capacity))
        if self._capacity is None:
            return self._collate(samples)
        assert isinstance(self._collate, Collator), "packs are collated by our own collator"
        return self._collate.pack(samples)

    def _row(self, index: int, piece: int = 0, epoch: int | None = None) -> Any:
        if epoch is not None:
            return self._dataset.get(index, piece, epoch)
        if index != FILLER or getattr(self._dataset, "has_fillers", False):
            sample = self._dataset[index]
            return {**sample, "row_id": index} if isinstance(self._collate, Collator) else sample
        sample = dict(self._dataset[0])  # a data set of the user's own: its first row, without targets
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
