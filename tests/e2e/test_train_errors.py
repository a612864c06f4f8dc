"""What ends `mindspeed-mm train` while it builds, trains or saves is at most three lines, and leaves no process.

The faults are those of a script of a user's own; bad configurations are in `test_bad_configurations.py`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import ROOT, launch_flags
from tests.support.processes import is_alive
from tests.support.train_command import Command

SCRIPT = ROOT / "tests/fixtures/user_scripts/pretrain_with_faults.py"
LINES, STEPS = 3, 6
KEPT = "its traceback is in '{run}/traceback-rank1.txt'; mindspeed-mm train --traceback … shows it here"
#: fault → ranks, and what is said of it; {run} is the run folder
FAULTS: dict[str, tuple[int, list[str]]] = {
    "build": (2, ["KeyError: 'width' (tests/fixtures/user_scripts/pretrain_with_faults.py, line ", ", in __init__)"]),
    "row": (2, ["ValueError: no row ", "pretrain_with_faults.py, line ", "in __getitem__)"]),
    "every rank": (2, ["RuntimeError: shapes (tests/fixtures/user_scripts/pretrain_with_faults.py, line ", "in fail)"]),
    "one rank": (2, ["RuntimeError: shapes differ (tests/", KEPT]),
    "exit": (2, ["rank 1 (process ", ") ended with status 3, and with it the run"]),
    "kill": (2, ["rank 1 (process ", ") was ended by SIGKILL, and with it the run"]),
    "import": (2, ["No module named 'nowhere'"]),
    "disk": (2, ["CheckpointError: the checkpoint of iteration 6 could not be saved", "No space left on device"]),
}
WITH_TRACEBACK = ("build", "row", "every rank", "one rank")

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc"),
]


@pytest.fixture
def started() -> Iterator[list[Command]]:
    commands: list[Command] = []
    yield commands
    for command in commands:
        command.kill()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """A run folder on a file system of its own, of 2 MB, where that can be had."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True)
    yield folder / "run"
    if made.returncode == 0:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def words_of(folder: Path, run: Path, ranks: int, **flags: Any) -> list[str]:
    (plan := folder / "fsdp2.yaml").write_text("sharding_size: auto\nsub_modules_to_wrap:\n  - layer\n")
    files: dict[str, Any] = {"fsdp2.yaml": plan, "model.json": None, "data.json": None, "tools.json": None}
    settings = {"micro_batch_size": 1, "global_batch_size": 2, "train_iters": STEPS, "save": run, "num_workers": 1}
    return ["--nproc-per-node", str(ranks), str(SCRIPT), *launch_flags(files, **{**settings, **flags})]


def lines_of(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line.strip()]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_said_in_a_few_lines(fault: str, started: list[Command], run: Path, tmp_path: Path) -> None:
    ranks, said = FAULTS[fault]
    words = words_of(tmp_path, run, ranks, save_interval=2 if fault == "disk" else None)
    if fault == "disk" and not os.path.ismount(run.parent):
        pytest.skip("can't mount a file system here")
    output, errors = tmp_path / "output.txt", tmp_path / "errors.txt"
    started.append(Command(words, output, errors, FAULT=fault))
    assert started[0].wait() == 1
    lines = lines_of(errors)
    assert 1 <= len(lines) <= LINES, errors.read_text()
    for part in said:
        assert part.format(run=run) in errors.read_text(), errors.read_text()
    assert "Traceback" not in errors.read_text() + output.read_text()
    kept = list(run.glob("traceback-rank*.txt"))
    assert len(kept) == (fault in WITH_TRACEBACK)
    if kept:
        assert str(kept[0]) in errors.read_text()
        assert "Traceback (most recent call last)" in kept[0].read_text()


def test_a_traceback_is_shown_where_it_is_asked_for(started: list[Command], run: Path, tmp_path: Path) -> None:
    errors = tmp_path / "errors.txt"
    started.append(Command(["--traceback", *words_of(tmp_path, run, 1)], tmp_path / "log.txt", errors, FAULT="build"))
    assert started[0].wait() == 1
    assert errors.read_text().count("Traceback (most recent call last)") == 1
    assert lines_of(errors)[-1].endswith("KeyError: 'width'") and not list(run.glob("traceback*"))


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_a_signal_to_the_command_saves_and_ends_with_0(
    name: str, started: list[Command], run: Path, tmp_path: Path
) -> None:
    errors = tmp_path / "errors.txt"
    started.append(Command(words_of(tmp_path, run, 2, train_iters=1_000_000), tmp_path / "log.txt", errors))
    started[0].wait_for(run, 3)
    os.kill(started[0].process.pid, getattr(signal, name))
    assert started[0].wait() == 0, errors.read_text()
    deadline = time.monotonic() + 20
    while any(map(is_alive, started[0].below)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(is_alive, started[0].below))
    both = lines_of(errors) + lines_of(tmp_path / "log.txt")
    assert len(lines_of(errors)) <= LINES and 1 <= sum(name in line for line in both) <= LINES
    assert int((run / "latest_checkpointed_iteration.txt").read_text()) >= 3
