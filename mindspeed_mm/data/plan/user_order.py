"""The order of a user's map-style data: micro-batches of indices, epoch after epoch, reproducible."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, SubsetRandomSampler
from torch.utils.data import WeightedRandomSampler as Weighted

from mindspeed_mm.data.plan.order import FixedOrder
from mindspeed_mm.utils.seeds import host_seeded, number_of

#: samplers of torch that are unaware of ranks
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
    """Random generators of the user's, which begin every epoch at a state that depends on the first one and the epoch.

    Args:
        generators: The generators; None among them is left out.
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
    """The order of the sampler of a user's DataLoader.

    Draws from a global random state depend on (seed, epoch), and draws from the sampler's own generator on that one's
    first state and the epoch: a resumed run gets the same order again. A `set_epoch` is called.

    Args:
        loader: The loader of the user.
        micro_batch_size: Rows of a micro-batch of a batch sampler without a size.
        seed: Seed of the run.
        whole_only: Leave out micro-batches with fewer rows.
    """

    def __init__(self, loader: DataLoader, micro_batch_size: int, seed: int, whole_only: bool = False) -> None:
        self.batch_sampler: Any = loader.batch_sampler
        self._cuts = type(loader.batch_sampler) is BatchSampler  # it only groups the rows of a sampler
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
        """ "plain": a sampler of torch with one order for all ranks; "ranks": one that divides by rank; or "custom"."""
        if self._rank_aware is not None:
            return "ranks"
        is_plain = type(self.sampler) in _PLAIN and (self._cuts or self.batch_sampler is None)
        return "plain" if is_plain else "custom"

    @property
    def name(self) -> str:
        """Name of the class that determines the order."""
        return type(self.sampler if self._cuts or self.batch_sampler is None else self.batch_sampler).__name__

    @property
    def ranks(self) -> tuple[int, int] | None:
        """(rank, number of ranks) of the sampler's part; None: it has none."""
        found = self._rank_aware
        return None if found is None else (int(found.rank), int(found.num_replicas))

    @property
    def chosen(self) -> Any:
        """The rows from which the sampler chooses, [rows] int64; None where it isn't given any."""
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
        """Return the first micro-batch of an epoch, which is drawn only once; None: it has none."""
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
