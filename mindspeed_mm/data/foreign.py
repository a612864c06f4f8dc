"""A user's own loader, made endless, step by step, and resumable although it keeps no position."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from mindspeed_mm.utils.errors import DataError
from mindspeed_mm.utils.log import notice
from mindspeed_mm.utils.seeds import seeded


class ForeignLoader:
    """Goes through an iterable of micro-batches epoch after epoch, whole steps only.

    What an epoch leaves over after its last whole step is dropped: no step takes batches of two epochs. An epoch's
    order, where it comes from torch's global random state (a DataLoader with shuffle=True), is drawn from (seed,
    epoch), so that a resumed run finds the same rows again; a sampler with `set_epoch` is told the epoch.
    """

    def __init__(self, loader: Any, micro_batches_per_step: int, seed: int) -> None:
        self.loader = loader
        self._per_step = micro_batches_per_step
        self._seed = seed
        self._usable = self._whole_steps()

    @property
    def global_batches_per_epoch(self) -> int | None:
        """Optimizer steps in an epoch; None for a loader without a length."""
        return None if self._usable is None else self._usable // self._per_step

    def batches(self, consumed: int = 0) -> Iterator[Any]:
        """Micro-batches without end, after `consumed` of them."""
        epoch, skip = 0, consumed
        if self._usable:
            epoch, skip = divmod(consumed, self._usable)
        if consumed:
            notice(f"the training loader keeps no position of its own: {skip} micro-batches are read and skipped")
        while True:
            for number, batch in enumerate(self._epoch(epoch)):
                if number >= skip:
                    yield batch
            # of a loader without a length, several epochs may lie before the position
            skip = max(0, skip - self._last_epoch)
            epoch += 1

    def _epoch(self, epoch: int) -> Iterator[Any]:
        sampler = getattr(self.loader, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        with seeded(self._seed, f"epoch {epoch}"):
            # samplers draw their order when the first batch is asked for
            iterator = iter(self.loader)
            pending = [b for b in (next(iterator, _END),) if b is not _END]
        self._last_epoch = 0
        while True:
            while len(pending) < self._per_step and (batch := next(iterator, _END)) is not _END:
                pending.append(batch)
            if len(pending) < self._per_step or self._last_epoch == self._usable:
                break
            self._last_epoch += self._per_step
            yield from pending
            pending = []
        if self._last_epoch == 0:
            raise DataError(
                f"the training loader yields {len(pending)} micro-batch(es) an epoch on this rank, fewer than the "
                f"{self._per_step} of one step; lower --global-batch-size or give it more rows"
            )

    def _whole_steps(self) -> int | None:
        try:
            length = len(self.loader)
        except TypeError:
            return None
        if length < self._per_step:
            raise DataError(
                f"the data loader yields {length} micro-batch(es) an epoch on this rank, fewer than the "
                f"{self._per_step} of one step; lower --global-batch-size or give it more rows"
            )
        return length - length % self._per_step


_END: Any = object()


def loader_generator(seed: int) -> torch.Generator:
    """A generator for a DataLoader of ours, so that it draws nothing from the global random state."""
    return torch.Generator().manual_seed(seed)
