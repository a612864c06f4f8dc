"""The order of a user's map-style data: micro-batches of indices, epoch after epoch, the same whenever asked."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, SubsetRandomSampler
from torch.utils.data import WeightedRandomSampler as Weighted

from mindspeed_mm.data.order import FixedOrder
from mindspeed_mm.utils.seeds import host_seeded, number_of

#: samplers of torch that know nothing of ranks
_PLAIN = (RandomSampler, SequentialSampler, SubsetRandomSampler, Weighted)

_END: Any = object()


class DataSetOrder:
    """Every row of a data set once an epoch, in our own order.

    Args:
        num_rows: Rows of the data set.
        micro_batch_size: Rows of a micro-batch.
        shuffle: A new order every epoch; else file order.
        seed: Decides the orders.
        drop_last: Leave out the rows that don't fill a micro-batch.
    """

    kind = "ours"

    def __init__(self, num_rows: int, micro_batch_size: int, shuffle: bool, seed: int, drop_last: bool) -> None:
        self._order = FixedOrder(num_rows, shuffle, seed)
        self._size = micro_batch_size
        self._drop_last = drop_last
        self.num_rows = num_rows

    @property
    def micro_batches(self) -> int:
        """Micro-batches of an epoch."""
        return self.num_rows // self._size if self._drop_last else -(-self.num_rows // self._size)

    def epoch(self, number: int) -> Iterator[list[int]]:
        """Yield the micro-batches of an epoch."""
        rows = self._order.epoch(number)
        batches = iter(lambda: list(itertools.islice(rows, self._size)), [])
        return itertools.islice(batches, self.micro_batches)


class FirstStates:
    """Random generators of the user's, which begin every epoch at a state that the first one and the epoch decide.

    Args:
        generators: None among them is left out.
    """

    def __init__(self, *generators: torch.Generator | None) -> None:
        self._states = [(each, each.get_state()) for each in dict.fromkeys(generators) if each is not None]

    def restart(self, epoch: int) -> None:
        """Begin an epoch."""
        for generator, state in self._states:
            generator.set_state(state)
            if epoch:
                generator.manual_seed(number_of(generator.initial_seed(), f"epoch {epoch}"))


class LoaderOrder:
    """What the sampler of a user's DataLoader gives.

    What it draws from a global random state comes from (seed, epoch), and what it draws from a generator of its own
    from that one's first state and the epoch: a resumed run finds the same order again. A `set_epoch` is called.

    Args:
        loader: The user's.
        micro_batch_size: Rows of a micro-batch that doesn't say.
        seed: The run's.
        whole_only: Leave out micro-batches with fewer rows.
    """

    def __init__(self, loader: DataLoader, micro_batch_size: int, seed: int, whole_only: bool = False) -> None:
        self.batch_sampler: Any = loader.batch_sampler
        self._cuts = type(loader.batch_sampler) is BatchSampler  # rows that a sampler gives, and does nothing else
        self.sampler: Any = loader.batch_sampler.sampler if self._cuts else loader.sampler  # type: ignore[union-attr]
        self._source = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        self._loader = loader
        self._size = micro_batch_size
        self._seed = seed
        self._whole_only = whole_only and loader.batch_sampler is not None
        self._generators = FirstStates(loader.generator, getattr(self.sampler, "generator", None))
        self._begun: tuple[int, Iterator[Any]] | None = None

    @property
    def kind(self) -> str:
        """ "plain": a sampler of torch that gives every rank the same; "ranks": one that knows ranks; or "custom"."""
        if self._rank_aware is not None:
            return "ranks"
        is_plain = type(self.sampler) in _PLAIN and (self._cuts or self.batch_sampler is None)
        return "plain" if is_plain else "custom"

    @property
    def name(self) -> str:
        """The class that decides the order."""
        return type(self.sampler if self._cuts or self.batch_sampler is None else self.batch_sampler).__name__

    @property
    def ranks(self) -> tuple[int, int] | None:
        """(rank, number of ranks) that the sampler takes the part of; None: it doesn't say."""
        found = self._rank_aware
        return None if found is None else (int(found.rank), int(found.num_replicas))

    @property
    def chosen(self) -> Any:
        """The rows that the sampler chooses from, [rows] int64, where it was told them."""
        indices = getattr(self.sampler, "indices", None) if self.kind == "plain" else None
        return None if indices is None else torch.as_tensor(indices)

    @property
    def num_rows(self) -> int | None:
        """Rows of an epoch; None: unknown."""
        if self._cuts:
            return length_of(self.sampler)
        batches = self.micro_batches
        return None if batches is None else batches * self._size

    @property
    def micro_batches(self) -> int | None:
        """Micro-batches of an epoch; None: unknown."""
        count = length_of(self._source)
        if not self._whole_only or count is None or not self._cuts:
            return count
        rows = length_of(self.sampler)
        return count if rows is None else rows // self._size

    def epoch(self, number: int) -> Iterator[Any]:
        """Yield the micro-batches of an epoch."""
        begun, self._begun = self._begun, None
        batches = begun[1] if begun is not None and begun[0] == number else self._begin(number)
        if self._whole_only:
            return (batch for batch in batches if len(batch) >= self._size)
        return batches

    def first(self, number: int) -> Any:
        """Return the first micro-batch of an epoch, which is drawn but once; None: it has none."""
        batches = self.epoch(number)
        found = next(batches, None)
        self._begun = number, batches if found is None else itertools.chain([found], batches)
        return found

    def _begin(self, number: int) -> Iterator[Any]:
        for sampler in {id(each): each for each in (self.sampler, self.batch_sampler)}.values():
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(number)
        self._generators.restart(number)
        with host_seeded(number_of(self._seed, f"epoch {number}")):
            # a DataLoader draws its workers' seed first: without that, orders would not be those of older checkpoints
            torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator)
            batches = iter(self._source)
            first = next(batches, _END)
        return iter(()) if first is _END else itertools.chain([first], batches)

    @property
    def _rank_aware(self) -> Any:
        for sampler in (self.batch_sampler, self.sampler):
            if hasattr(sampler, "num_replicas") and hasattr(sampler, "rank"):
                return sampler
        return None


def length_of(source: object) -> int | None:
    """Return the length of a loader, sampler or iterable; None: it has none."""
    try:
        return len(source) if isinstance(source, Sized) else None
    except TypeError:
        return None
