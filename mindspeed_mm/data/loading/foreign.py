"""A user's own data as endless micro-batches of one data-parallel rank, resumable at whole global batches."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe

from mindspeed_mm.data.loading.user_rows import DrawnBatch, SeededRows, SeededStream, stream_key, with_our_workers
from mindspeed_mm.data.plan.plan import BatchLayout
from mindspeed_mm.data.plan.user_order import DataSetOrder, FirstStates, LoaderOrder, length_of
from mindspeed_mm.data.workers import as_it_is, next_batch, shut_down, start_loader
from mindspeed_mm.utils.errors import DataError
from mindspeed_mm.utils.log import notice
from mindspeed_mm.utils.seeds import host_seeded, number_of

_END: Any = object()


class UserLoader(ABC):
    """Base of the loaders over a user's data: whole steps, and the position.

    In training an epoch's last micro-batches that don't fill a step are left out: no step takes batches of two epochs.
    In evaluation every micro-batch comes once a pass; a rank that lacks some for the last step repeats others, whose
    loss isn't counted (`is_filler`).

    Args:
        layout: Sizes of a batch.
        rank: Data-parallel rank.
        seed: Seed of the run.
        training: False for evaluation.
    """

    def __init__(self, layout: BatchLayout, rank: int, seed: int, training: bool) -> None:
        self.layout = layout
        self.rank = rank
        self.consumed_samples = 0
        self._seed = seed
        self._training = training
        self._epoch, self._step = 0, 0
        self._fillers: set[int] = set()

    num_rows: int | None = None
    global_batches_per_epoch: int | None = None

    def batches(self) -> Iterator[Any]:
        """Yield micro-batches endlessly from the position; it advances when the last one of a step is yielded."""
        if not self._training:
            self._epoch, self._step = 0, 0
            self._fillers.clear()
        for number, (batch, is_filler, after) in enumerate(self._read()):
            if is_filler:
                self._fillers.add(number)
            if after is not None:
                self._epoch, self._step = after
                self.consumed_samples += self.layout.global_batch_size
            yield batch

    def is_filler(self, number: int) -> bool:
        """Whether the micro-batch of this number, counted from the last start and already read, repeats another."""
        return number in self._fillers

    def state_dict(self) -> dict[str, Any]:
        """Return the position: plain numbers, the same on every rank."""
        place = self._step * self.layout.global_batch_size
        return {"consumed_samples": self.consumed_samples, "epoch": self._epoch, "place": place}

    def go_to(self, state: Mapping[str, Any]) -> None:
        """Take a position: the epoch, and the first whole step at or after its place.

        Args:
            state: A result of `state_dict`; with consumed_samples only, a position of a run with these sizes.
        """
        self.consumed_samples = int(state["consumed_samples"])
        steps, size = self.global_batches_per_epoch, self.layout.global_batch_size
        if "place" in state:
            self._epoch, self._step = int(state["epoch"]), -(-int(state["place"]) // size)
            if steps is not None and self._step >= steps:
                self._epoch, self._step = self._epoch + 1, 0
        else:
            step = -(-self.consumed_samples // size)
            self._epoch, self._step = divmod(step, steps) if steps else (0, step)

    @abstractmethod
    def check_length(self) -> None:
        """Raise DataError if an epoch is shorter than one step."""

    @abstractmethod
    def close(self) -> None:
        """End the workers."""

    @abstractmethod
    def _read(self) -> Iterator[tuple[Any, bool, tuple[int, int] | None]]:
        """(micro-batch, whether it is a filler, the position after it where a step ends), from the position on."""

    def _too_few(self, found: int, needed: int) -> DataError:
        rows = "" if self.num_rows is None else f"{self.num_rows} row(s), "
        return DataError(
            f"the data give {rows}{found} micro-batch(es) of --micro-batch-size "
            f"{self.layout.micro_batch_size} an epoch, fewer than the {needed} of one step (--global-batch-size "
            f"{self.layout.global_batch_size}); lower --global-batch-size or give it more rows"
        )


class IndexedLoader(UserLoader):
    """Micro-batches of a map-style data set, by the indices of an order.

    Where ranks share an order, micro-batch m of rank r of n is the order's (m·n + r)-th: the same global batches for
    any number of ranks. A resume reads no row before its position.

    Args:
        loader: The user's DataLoader, or one over the user's data set.
        order: The order of its micro-batches.
        layout, rank, seed, training: As in `UserLoader`.
    """

    def __init__(
        self,
        loader: DataLoader,
        order: DataSetOrder | LoaderOrder,
        layout: BatchLayout,
        rank: int,
        seed: int,
        training: bool,
    ) -> None:
        super().__init__(layout, rank, seed, training)
        self.dataset = loader.dataset
        self.order = order
        self.num_workers = loader.num_workers
        self._loader = loader
        self._prefetched: deque[tuple[bool, tuple[int, int] | None]] = deque()
        self._running: Any = None
        is_shared, rows = order.kind in ("plain", "ours"), order.num_rows
        self.share(is_shared, order.micro_batches, rows if is_shared or rows is None else rows * layout.dp_size)

    def share(self, is_shared: bool, micro_batches: int | None, num_rows: int | None) -> None:
        """Set whether ranks share the order, or each has a part of its own.

        Args:
            is_shared: Each rank takes its micro-batches out of one order.
            micro_batches: Number in an epoch of the order; where ranks have parts, in the smallest part.
            num_rows: Number in an epoch, over all ranks.
        """
        self.num_rows = num_rows
        self._stride = self.layout.dp_size if is_shared else 1
        self._block = self.layout.micro_batches * self._stride
        self.global_batches_per_epoch = None
        if micro_batches is not None:
            whole, rest = divmod(micro_batches, self._block)
            self.global_batches_per_epoch = whole + bool(rest and not self._training)

    def check_length(self) -> None:
        """Raise DataError if an epoch is shorter than one step."""
        if self.global_batches_per_epoch == 0:
            raise self._too_few(self.order.micro_batches or 0, self._block)

    def first_indices(self) -> Any:
        """Return the indices of the sampler's first micro-batch; None: none, or there is no sampler."""
        return self.order.first(self._epoch) if isinstance(self.order, LoaderOrder) else None

    def probe(self) -> list[Any]:
        """Read the epoch's first micro-batch twice, in a process of its own if the loader has workers."""
        indices = self.first_indices()
        if indices is None:
            return []
        reading = self._seeded_copy([DrawnBatch(indices, self._epoch, 0)] * 2)
        if self.num_workers:
            reading.__dict__.update(num_workers=1, persistent_workers=False)
        running = start_loader(reading)
        found = [next_batch(running, self.num_workers) for _ in range(2)]
        shut_down(running)
        return found

    def close(self) -> None:
        """End the workers."""
        running, self._running = getattr(self, "_running", None), None
        shut_down(running)

    def _read(self) -> Iterator[tuple[Any, bool, tuple[int, int] | None]]:
        self._prefetched.clear()
        if not self._loader.persistent_workers or self._running is None:
            self.close()
            self._reading = self._seeded_copy(_Restarting(self._drawn))
        self._running = running = start_loader(self._reading)
        while True:
            batch = next_batch(running, self.num_workers)
            yield batch, *self._prefetched.popleft()

    def _seeded_copy(self, batch_sampler: Iterable[DrawnBatch]) -> DataLoader:
        """Return a copy of the user's loader that reads these micro-batches, each row with its own random numbers."""
        collates = self._loader.batch_sampler is not None
        rows = SeededRows(self.dataset, self._loader.collate_fn, self._seed, collates)
        copied = with_our_workers(self._loader, dataset=rows, batch_sampler=batch_sampler, collate_fn=as_it_is)
        # of its own, so that nothing is drawn from the global random state or from the order's generator
        copied.generator = torch.Generator().manual_seed(self._seed)
        return copied

    def _drawn(self) -> Iterator[DrawnBatch]:
        """The micro-batches of this rank, drawn before they are yielded by the loader."""
        size, stride, skip = self.layout.micro_batch_size, self._stride, self._step
        for epoch in itertools.count(self._epoch):
            batches, steps = self.order.epoch(epoch), 0
            opening: Any = None
            while block := list(itertools.islice(batches, self._block)):
                opening = block[0] if opening is None else opening
                if self._training and (len(block) < self._block or steps == self.global_batches_per_epoch):
                    break
                steps += 1
                if steps > skip:
                    yield from self._own(block, opening, epoch, steps, size, stride)
            if opening is None or (self._training and not steps):
                raise self._too_few(len(block), self._block)
            while not self._training and steps < (self.global_batches_per_epoch or 0):  # another rank's part is larger
                steps += 1
                yield from self._own([], opening, epoch, steps, size, stride)
            # of an order without a length several epochs may lie before the position
            skip = max(0, skip - steps)

    def _own(
        self, block: list[Any], opening: object, epoch: int, steps: int, size: int, stride: int
    ) -> Iterator[DrawnBatch]:
        offset = self.rank if stride > 1 else 0
        after = (epoch + 1, 0) if steps == self.global_batches_per_epoch else (epoch, steps)
        for number in range(self.layout.micro_batches):
            place = number * stride + offset
            is_filler = place >= len(block)
            # rows of separate parts get places as if they had been dealt out in turn
            overall = (steps - 1) * self.layout.micro_batches + number
            overall = overall * self.layout.dp_size + self.rank
            self._prefetched.append((is_filler, after if number + 1 == self.layout.micro_batches else None))
            yield DrawnBatch(opening if is_filler else block[place], epoch, overall * size)


class _Restarting:
    """A batch sampler whose every iteration begins at the loader's position."""

    def __init__(self, begin: Callable[[], Iterator[DrawnBatch]]) -> None:
        self._begin = begin

    def __iter__(self) -> Iterator[DrawnBatch]:
        return self._begin()


class StreamLoader(UserLoader):
    """Reads an iterable of this rank's micro-batches, epoch after epoch; a resume reads and skips.

    Args:
        loader: The user's iterable, or a DataLoader over an iterable data set.
        layout, rank, seed, training: As in `UserLoader`.
    """

    def __init__(self, loader: Iterable[Any], layout: BatchLayout, rank: int, seed: int, training: bool) -> None:
        super().__init__(layout, rank, seed, training)
        self.dataset = getattr(loader, "dataset", None)
        self.num_workers = loader.num_workers if isinstance(loader, DataLoader) else 0
        self._loader = self._stream = loader
        self._peeked: deque[Any] = deque()
        self._reading: Iterator[Any] | None = None
        self._running: Any = None
        if isinstance(loader, DataLoader):
            changed: dict[str, Any] = {}
            is_pipe = isinstance(self.dataset, IterDataPipe)  # these are seeded by torch
            if self.num_workers and isinstance(self.dataset, IterableDataset) and not is_pipe:
                changed["dataset"] = SeededStream(self.dataset, loader.batch_size or 1, seed, rank)
            self._stream = with_our_workers(loader, **changed)
        self._generators = FirstStates(getattr(loader, "generator", None))
        self.share(length_of(loader))

    def share(self, micro_batches: int | None) -> None:
        """Set the number of micro-batches of an epoch on which all ranks agree; None: unknown."""
        self.micro_batches = micro_batches
        if micro_batches is None:
            self.num_rows = self.global_batches_per_epoch = None
            return
        self.num_rows = micro_batches * self.layout.micro_batch_size * self.layout.dp_size
        whole, rest = divmod(micro_batches, self.layout.micro_batches)
        self.global_batches_per_epoch = whole + bool(rest and not self._training)

    def check_length(self) -> None:
        """Raise DataError if an epoch is shorter than one step."""
        if self.global_batches_per_epoch == 0:
            raise self._too_few(self.micro_batches or 0, self.layout.micro_batches)

    @property
    def is_used_up(self) -> bool:
        """Whether the data can be read only once: an iterator."""
        return hasattr(self._loader, "__next__")

    def peek(self, number: int) -> list[Any]:
        """Return the next micro-batches without consuming them."""
        self._reading = self._reading or self._steps()
        while len(self._peeked) < number:
            self._peeked.append(next(self._reading))
        return [batch for batch, _, _ in self._peeked]

    def close(self) -> None:
        """End the workers."""
        running, self._running = getattr(self, "_running", None), None
        shut_down(running)

    def _read(self) -> Iterator[tuple[Any, bool, tuple[int, int] | None]]:
        if not self._training:
            self.close()
            self._peeked.clear()
            self._reading = None
        reading = self._reading or self._steps()
        self._reading = None
        while self._peeked:
            yield self._peeked.popleft()
        yield from reading

    def _steps(self) -> Iterator[tuple[Any, bool, tuple[int, int] | None]]:
        per_step, limit, skip = self.layout.micro_batches, self.global_batches_per_epoch, self._step
        if skip:
            count = skip * per_step
            notice(f"the training loader keeps no position of its own: {count} micro-batches are read and skipped")
        for epoch in itertools.count(self._epoch):
            batches, steps = self._begin(epoch), 0
            last: list[Any] = []
            while limit is None or steps < limit:
                block = list(itertools.islice(batches, per_step))
                last = block[-1:] or last
                missing = per_step - len(block)
                if missing and (self._training or not (block or (last and limit))):
                    break
                steps += 1
                if steps <= skip:
                    continue
                after = (epoch + 1, 0) if steps == limit else (epoch, steps)
                for number, batch in enumerate(block + last * missing, start=1):
                    yield batch, number > len(block), after if number == per_step else None
            if not steps:
                raise self._too_few(len(block), per_step)
            skip = max(0, skip - steps)

    def _begin(self, epoch: int) -> Iterator[Any]:
        """The micro-batches of an epoch; each is seeded by itself where this process builds it."""
        sampler: Any = getattr(self._loader, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        if isinstance(self._stream, DataLoader) and isinstance(self._stream.dataset, SeededStream):
            self._stream.dataset.epoch = epoch
        self._generators.restart(epoch)
        with host_seeded(number_of(self._seed, f"epoch {epoch}")):
            # samplers draw their order when the first batch is read
            is_torch = isinstance(self._stream, DataLoader)
            running: Any = start_loader(self._stream) if is_torch else iter(self._stream)
            self._running = running
            batch = self._next(running)
        for number in itertools.count(1):
            if batch is _END:
                return
            yield batch
            with host_seeded(stream_key(self._seed, epoch, self.rank, number)):
                batch = self._next(running)

    def _next(self, running: Iterator[Any]) -> Any:
        try:
            return next_batch(running, self.num_workers)
        except StopIteration:
            return _END
