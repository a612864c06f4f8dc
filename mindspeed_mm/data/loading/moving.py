"""Micro-batches that are copied to the device while it computes on those before them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from mindspeed_mm import accelerator
from mindspeed_mm.data.loading.counting import HOST_FIELDS
from mindspeed_mm.utils.device import move_to_device
from mindspeed_mm.utils.errors import DataError


def endless(read: Callable[[], Any]) -> Iterator[Any]:
    """Yield what `read` returns, without end."""
    while True:
        yield read()


def moved_ahead(batches: Iterator[dict[str, Any]], *host_keys: str) -> Iterator[dict[str, Any]]:
    """Yield micro-batches on the device; while one is used, the copy of the next one is under way.

    So there is one micro-batch more in the device's memory. An error of the data is raised when it is the turn of the
    micro-batch that couldn't be read.

    Args:
        batches: prepared micro-batches in host memory, without end.
        host_keys: fields that stay there, beside those that no model takes.
    """
    upcoming = _start(batches, host_keys)
    while True:
        batch = upcoming()
        upcoming = _start(batches, host_keys)
        yield batch


def _start(batches: Iterator[dict[str, Any]], host_keys: tuple[str, ...]) -> Callable[[], dict[str, Any]]:
    """Read a micro-batch and begin to copy it; returns what hands it out."""
    try:
        batch = next(batches)
    except DataError as error:
        return _raising(error)
    kept = {key: batch.pop(key) for key in (*HOST_FIELDS, *host_keys) if key in batch}
    device = accelerator.current()
    moved = device.ahead(lambda: move_to_device(batch, device.device()))
    return lambda: {**moved(), **kept}


def _raising(error: DataError) -> Callable[[], dict[str, Any]]:
    def hand_out() -> dict[str, Any]:
        raise error

    return hand_out
