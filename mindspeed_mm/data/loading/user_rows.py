"""A user's data set in its loader's workers: seeded per row, so that a resume repeats its random numbers."""

from __future__ import annotations

import copy
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from mindspeed_mm.data.workers import WorkerStart
from mindspeed_mm.utils.sample_random import sample_key
from mindspeed_mm.utils.seeds import host_seeded, seed_host


class DrawnBatch(NamedTuple):
    """The rows of a micro-batch.

    Attributes:
        indices: the batch sampler's output: rows of the plan, or indices; one index where the loader doesn't collate.
        epoch: passes over the data before this one; 0 where `place` counts over all of them.
        place: place of the first row, over all ranks.
    """

    indices: Any
    epoch: int
    place: int


class SeededRows(Dataset):
    """Finished micro-batches of a map-style data set.

    Before a row is read, `random`, numpy's global state and torch's default generator are seeded from the run's seed,
    the epoch and the row's place in it: augmentation differs between rows, ranks and epochs, depends neither on workers
    nor on a resume, and this process's own random state stays as it was.

    Args:
        dataset: The data set of the user.
        collate: Builds a micro-batch of rows.
        seed: Seed of the run.
        collates: Whether rows are collated; else the data set returns whole micro-batches.
    """

    def __init__(self, dataset: Dataset, collate: Callable[[Any], Any], seed: int, collates: bool = True) -> None:
        self._dataset = dataset
        self._collate = collate
        self._seed = seed
        self._collates = collates

    def __getitems__(self, batch: DrawnBatch) -> Any:
        """Return a micro-batch."""
        key = self._key(batch, 0)
        with host_seeded(key) if get_worker_info() is None else nullcontext():
            seed_host(key)
            rows = self._rows(batch)
            seed_host(key ^ 1)
            return self._collate(rows)

    def _rows(self, batch: DrawnBatch) -> Any:
        if not self._collates:
            return self._dataset[batch.indices]
        if getattr(self._dataset, "__getitems__", None):
            return self._dataset.__getitems__(batch.indices)
        rows = []
        for number, index in enumerate(batch.indices):
            seed_host(self._key(batch, number))
            rows.append(self._dataset[index])
        return rows

    def _key(self, batch: DrawnBatch, number: int) -> int:
        return sample_key(self._seed, batch.place + number, batch.epoch)


class SeededStream(IterableDataset):
    """An iterable data set in workers, seeded per micro-batch.

    The first micro-batch of a worker and epoch has the same seed on every rank, so that ranks can divide an order that
    a data set draws at its beginning; the seeds of later ones depend on the rank.

    Args:
        dataset: The data set of the user.
        batch_size: Samples of a micro-batch.
        seed: Seed of the run.
        rank: Data-parallel rank.
    """

    def __init__(self, dataset: IterableDataset, batch_size: int, seed: int, rank: int) -> None:
        self._dataset = dataset
        self._batch_size = batch_size
        self._seed = seed
        self._rank = rank
        self.epoch = 0
        self._begun = 0  # persistent workers count the epochs themselves

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker = info.id if info is not None else 0
        epoch, self._begun = self.epoch + self._begun, self._begun + 1
        seed_host(stream_key(self._seed, epoch, self._rank, 0, worker))
        samples = iter(self._dataset)
        number = 0
        while True:
            if number % self._batch_size == 0:
                seed_host(stream_key(self._seed, epoch, self._rank, number // self._batch_size, worker))
            try:
                sample = next(samples)
            except StopIteration:
                return
            number += 1
            yield sample


def stream_key(seed: int, epoch: int, rank: int, number: int, worker: int = 0) -> int:
    """Return the key of a stream's micro-batch `number`; the first one's is the same on every rank."""
    return sample_key(sample_key(seed, rank if number else -1, worker), number, epoch)


def with_our_workers(loader: DataLoader, **changed: Any) -> DataLoader:
    """Return a copy of a user's loader whose workers outlive a scheduler's signals.

    Args:
        loader: The loader of the user; it is unchanged, and the copy has all of its options.
        changed: Attributes of the copy that differ.
    """
    copied = copy.copy(loader)
    # DataLoader refuses to have these set after its construction; a constructor of a subclass may take anything
    copied.__dict__.update(changed, _iterator=None)
    if loader.num_workers:
        copied.worker_init_fn = WorkerStart(loader.dataset, loader.worker_init_fn)
        if loader.multiprocessing_context is None and "fork" in multiprocessing.get_all_start_methods():
            copied.multiprocessing_context = "fork"
    return copied
