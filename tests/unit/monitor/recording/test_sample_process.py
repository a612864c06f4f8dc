"""The process that renders samples: it works once, and is gone with its work, or with the run, however that ends."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.monitor.recording import samples
from mindspeed_mm.monitor.recording.samples import SampleRecorder

FORK = multiprocessing.get_context("fork")


class Rows:
    """A renderer that shows the number of a row, and who renders it."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds

    def kinds(self, row: int) -> Sequence[str]:
        return ["image"] if row % 2 else []

    def render(self, row: int, folder: Path) -> dict[str, Any]:
        time.sleep(self._seconds)
        return {"row": row, "process": os.getpid(), "niceness": os.nice(0), "media": []}


def is_gone(process: int, seconds: float = 10.0) -> bool:
    """Whether a process that isn't ours to wait for ends in time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{process}/stat").read_text().rsplit(")")[1].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_it_renders_rows_of_the_first_steps_and_ends(tmp_path: Path) -> None:
    others = set(FORK.active_children())  # pools of other tests
    recorder = SampleRecorder(Rows(), tmp_path)
    for step in range(8):
        recorder.add([3 * step, 3 * step + 1, 3 * step + 2] if step else None)
    recorder.close()
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [line["row"] for line in lines] == [3, 4, 5, 6, 7, 8]  # of the first five steps, pictures and texts in turn
    assert {line["process"] for line in lines} != {os.getpid()} and {line["niceness"] for line in lines} == {19}
    assert set(FORK.active_children()) <= others


def test_without_a_step_nothing_is_written(tmp_path: Path) -> None:
    others = set(FORK.active_children())  # pools of other tests
    SampleRecorder(Rows(), tmp_path / "report").close()
    assert not (tmp_path / "report").exists()
    assert set(FORK.active_children()) <= others


def test_the_end_of_a_run_waits_for_it_not_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = set(FORK.active_children())  # pools of other tests
    monkeypatch.setattr(samples, "_LAST_SECONDS", 0.2)
    recorder, started = SampleRecorder(Rows(seconds=60), tmp_path), time.monotonic()
    recorder.add([1])
    recorder.close()
    assert time.monotonic() - started < 30
    assert set(FORK.active_children()) <= others


def record_and_wait(folder: Path, sender: Connection) -> None:
    """A run that is about to be killed."""
    SampleRecorder(Rows(), folder)
    sender.send([child.pid for child in FORK.active_children()])
    time.sleep(60)


def test_it_ends_with_a_run_that_is_killed(tmp_path: Path) -> None:
    receiver, sender = FORK.Pipe(duplex=False)
    run = FORK.Process(target=record_and_wait, args=(tmp_path, sender))
    run.start()
    (recorder,) = receiver.recv()
    assert not is_gone(recorder, 0.2) and run.pid is not None
    os.kill(run.pid, signal.SIGKILL)
    run.join()
    assert is_gone(recorder)
