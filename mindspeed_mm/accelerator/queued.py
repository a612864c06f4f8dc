"""Devices with a queue of their own, and streams beside it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from mindspeed_mm.accelerator.base import Accelerator, CopyT
from mindspeed_mm.utils.device import tensors_in


class QueuedAccelerator(Accelerator):
    """A device whose library has the streams and events of `torch.cuda`, by its names."""

    _copies: Any = None  # the stream of copies beside the device's queue
    _inputs: Any = None  # that of micro-batches

    @property
    @abstractmethod
    def library(self) -> Any:
        """The module of streams and events."""

    def synchronize(self) -> None:
        self.library.synchronize()

    def ahead(self, copy: Callable[[], CopyT]) -> Callable[[], CopyT]:
        if self._inputs is None:
            self._inputs = self.library.Stream()
        with self.library.stream(self._inputs):
            result = copy()
            copied = self.record_event()

        def take() -> CopyT:
            queue = self.library.current_stream()
            queue.wait_event(copied)
            for tensor in tensors_in(result):
                if self.holds(tensor):
                    tensor.record_stream(queue)  # its memory is of the other stream, which may be further
            return result

        return take

    def copy_beside(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        if self._copies is None:
            self._copies = self.library.Stream()
        self._copies.wait_stream(self.library.current_stream())
        with self.library.stream(self._copies):
            target.copy_(source, non_blocking=True)
            if self.holds(target):
                target.record_stream(self._copies)  # it may be let go of before anything has waited for the copy
            copied = self.record_event()
        return lambda: self.library.current_stream().wait_event(copied)

    def record_event(self) -> Any:
        event = self.library.Event()
        event.record()
        return event
