"""When the loop saves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed_mm.training import Progress, _epoch_samples, _save_is_due
from mindspeed_mm.utils.errors import ConfigError
from tests.support.runs import run_of


def saves(batches: int | None, steps: int, size: int = 4, start: int = 0, **flags: Any) -> list[int]:
    """Iterations after which a checkpoint is due."""
    run = run_of(**{"save": "run", **flags}, micro_batch_size=size)
    data = SimpleNamespace(global_batches_per_epoch=batches, why_no_length="this one is streamed")
    epoch = _epoch_samples(data, run)  # type: ignore[arg-type]
    progress = Progress(0, start)
    due = []
    for _ in range(steps):
        progress.iteration += 1
        progress.consumed_samples += size
        if _save_is_due(progress, epoch, run):
            due.append(progress.iteration)
    return due


def test_intervals_and_epochs() -> None:
    assert saves(None, 10) == []
    assert saves(None, 10, save_interval=4) == [4, 8]
    assert saves(3, 13, save_epochs=1) == [3, 6, 9, 12]
    assert saves(3, 13, save_epochs=2) == [6, 12]
    assert saves(3, 13, save_epochs=2, save_interval=5) == [5, 6, 10, 12]
    assert saves(3, 13, save=None, save_epochs=2) == []


def test_epochs_go_on_with_the_position_in_the_data() -> None:
    """Resumed after 5 of 6 rows with another batch size: the first step ends the epoch."""
    assert saves(3, 7, size=2, start=5, save_epochs=1) == [1, 4, 7]


def test_epochs_of_a_stream_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--save-epochs 2 needs a data set with a length.*--save-interval"):
        saves(None, 3, save_epochs=2)
