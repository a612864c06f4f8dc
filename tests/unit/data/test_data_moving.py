"""Micro-batches that are moved to the device one before they are needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from mindspeed_mm.accelerator.cuda import CUDAAccelerator
from mindspeed_mm.accelerator.npu import NPUAccelerator
from mindspeed_mm.data.loading.counting import BatchCounts
from mindspeed_mm.data.loading.moving import moved_ahead
from mindspeed_mm.utils.device import OnHost
from mindspeed_mm.utils.errors import DataError
from tests.support.fake_accelerator import fake_accelerator


def batches() -> Iterator[dict[str, Any]]:
    """Two micro-batches, and a row that can't be read."""
    for number in range(2):
        grid = OnHost(torch.ones(1, 3))
        yield {"input_ids": torch.full((2,), number), "grid": grid, "num_rows": number, "counts": BatchCounts()}
    raise DataError("a bad row")


def test_the_next_micro_batch_is_on_its_way_while_one_is_used() -> None:
    with fake_accelerator() as fake:
        moved = moved_ahead(batches())
        assert fake.log == []  # nothing is read before the first one is asked for
        first = next(moved)
        assert fake.log == ["ahead", "taken", "ahead"]
        assert first["input_ids"].tolist() == [0, 0] and first["num_rows"] == 0
        assert first["counts"] == BatchCounts() and isinstance(first["grid"], OnHost)
        assert next(moved)["input_ids"].tolist() == [1, 1]
        assert fake.log == ["ahead", "taken", "ahead", "taken"]
        with pytest.raises(DataError, match="a bad row"):  # at its turn: what was there before it has been used
            next(moved)


class Queue:
    """A stream of `Library`, which notes what is done with it."""

    def __init__(self, log: list[str], name: str) -> None:
        self._log, self.name = log, name

    def wait_event(self, event: Any) -> None:
        self._log.append(f"{self.name} waits for {event.name}")


class Library:
    """What `torch.cuda` and `torch_npu.npu` have, without a device."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._queues = [Queue(self.log, "queue")]

    def Stream(self) -> Queue:
        return Queue(self.log, "side")

    def Event(self) -> Any:
        name = f"event of {self._queues[-1].name}"
        return mock.Mock(record=lambda: self.log.append(f"{self._queues[-1].name} records"), **{"name": name})

    def current_stream(self) -> Queue:
        return self._queues[-1]

    @contextmanager
    def stream(self, queue: Queue) -> Iterator[None]:
        self._queues.append(queue)
        yield
        self._queues.pop()


@pytest.mark.parametrize("kind", [CUDAAccelerator, NPUAccelerator])
def test_copies_go_beside_the_queue_which_waits_for_them_when_they_are_taken(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tensor, whose memory is of the other stream, is kept until the queue is done with it."""
    library, device = Library(), kind.__new__(kind)
    for name in ("Stream", "Event", "current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(library, name))
    device._npu = library

    class OnDevice(torch.Tensor):
        def record_stream(self, stream: Any) -> None:
            library.log.append(f"kept for {stream.name}")

    monkeypatch.setattr(kind, "holds", lambda self, where: isinstance(where, OnDevice))

    def copy() -> dict[str, Any]:
        library.log.append(f"copy on {library.current_stream().name}")
        return {"pixels": torch.ones(1).as_subclass(OnDevice), "on_host": OnHost(torch.ones(1)), "row": torch.ones(1)}

    take = device.ahead(copy)
    assert library.log == ["copy on side", "side records"]
    take()
    assert len(library.log) == 4 and library.log[3] == "kept for queue"
    assert library.log[2].startswith("queue waits for ")
