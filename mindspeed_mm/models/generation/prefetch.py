"""Prefetching of micro-batches: several are encoded at once, so that frozen encoders can be offloaded between."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from mindspeed_mm.data.loading.counting import drop_host_fields
from mindspeed_mm.models.generation.sample_encoder import SampleEncoder
from mindspeed_mm.utils.log import notice


class PrefetchEncoder:
    """Prefetches a run's micro-batches and prepares them for the model.

    Micro-batches are taken from the data and prepared several at a time, but never more than the optimizer step has
    left: counts and the position in the data belong to the step that trains them, so that a checkpoint between two
    steps stores exactly its own. Each is encoded by itself, so that the interval changes no value.

    Args:
        prepare: prepares a collated micro-batch for the model.
        encoder: frozen parts, offloaded to the host in between.
        interval: micro-batches that are encoded at once; 1: each when it is needed, without offloading.
        num_microbatches: micro-batches of an optimizer step, or of an evaluation's global batch.
    """

    def __init__(
        self,
        prepare: Callable[[dict[str, Any]], dict[str, Any]],
        encoder: SampleEncoder,
        interval: int,
        num_microbatches: int,
    ) -> None:
        self._prepare, self._encoder, self._interval = prepare, encoder, interval
        self._num_microbatches = num_microbatches
        self._source: Iterator[Any] | None = None
        self._ready: deque[dict[str, Any]] = deque()
        self._left = 0

    def next_batch(self, source: Iterator[Any]) -> dict[str, Any]:
        """Return the next micro-batch of `source`.

        Args:
            source: collated micro-batches; another one than before (of an evaluation) begins with a step.
        """
        if source is not self._source:
            self._source, self._left = source, 0
            self._ready.clear()
        if not self._ready:
            self._left = self._left or self._num_microbatches
            self._fill(source, min(self._interval, self._left))
            if self._interval > self._num_microbatches:
                notice(
                    f"model.json: 'encoder_offload_interval' is {self._interval}, and an optimizer step has "
                    f"{self._num_microbatches} micro-batch(es) of a rank: so many are encoded at once"
                )
        self._left -= 1
        return self._ready.popleft()

    def _fill(self, source: Iterator[Any], number: int) -> None:
        if self._interval > 1:
            self._encoder.load()
        for _ in range(number):
            batch = dict(next(source))
            drop_host_fields(batch)
            self._ready.append(self._prepare(batch))
        if self._interval > 1:
            self._encoder.offload()
