"""Trackers of a run that is killed, restarted, stopped and continued."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mindspeed_mm.monitor.metrics import read_metrics
from mindspeed_mm.monitor.trackers.sink import figures_of_line
from tests.support.launch import WRAP_TEXT, launch_flags, write_run_files
from tests.support.processes import is_alive
from tests.support.tiny import write_mixed_dataset
from tests.support.tracker_stores import Figures, figures_by_tracker, offline_variables
from tests.support.train_command import Command, last_of

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc"),
]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[Command]]:
    commands: list[Command] = []
    yield commands
    for command in commands:
        command.kill()


def lines_of(run: Path) -> dict[int, list[dict[str, float]]]:
    """Step → the figures of each time that it came, an evaluation's by themselves."""
    found: dict[int, list[dict[str, float]]] = {}
    for line in read_metrics(run / "metrics.jsonl"):
        found.setdefault(line["iteration"], []).append(figures_of_line(line))
    return found


def complaints(said: str) -> list[str]:
    """What a run has said of trackers that fail."""
    return [line for line in said.splitlines() if line.endswith("; training goes on") or " lacks " in line]


def check_store(name: str, parts: list[Figures], run: Path) -> None:
    """Each figure is there, as it was one of the times that its step came; a killed part may end within a step."""
    lines = lines_of(run)
    for step, times in lines.items():
        found = set().union(*(part.get(step, {}) for part in parts))
        assert found == set().union(*times), (name, step)
    for part in parts:
        for step, figures in part.items():
            for key, value in figures.items():
                known = [line[key] for line in lines[step] if key in line]
                assert any(value == pytest.approx(one, rel=1e-6) for one in known), (name, step, key, value, known)


def test_all_trackers_after_a_kill_a_restart_a_stop_and_another_start(
    qwen3_dir: Path, tmp_path: Path, started: list[Command], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank that is killed is the one that logs. No process of a tracker is left."""
    for variable, value in offline_variables(tmp_path).items():
        monkeypatch.setenv(variable, value)
    data = write_mixed_dataset(tmp_path / "data", rows=14, images=False)
    rows = {"dataset_param.basic_parameters.val_rate": 0.3}
    files = write_run_files(tmp_path, qwen3_dir, data, data=rows, fsdp2={"sub_modules_to_wrap": WRAP_TEXT})
    run = tmp_path / "run"
    flags = launch_flags(files, micro_batch_size=1, global_batch_size=4, save=run, load=run, save_interval=4)
    flags += ["--eval-interval", "4", "--eval-iters", "1", "--run-project", "mine", "--report-to"]
    flags += ["tensorboard", "wandb", "swanlab", "mlflow", "trackio"]
    words = ["--nproc-per-node", "2", "--max-restarts", "1", "pretrain_transformers.py", *flags]
    endless = Command([*words, "--train-iters", "100000"], tmp_path / "first.txt")
    started.append(endless)
    endless.wait_for(run, 40)
    before = endless.rank(1)
    os.kill(before, signal.SIGKILL)
    endless.wait_for(run, last_of(run) + 20)
    endless.process.send_signal(signal.SIGTERM)
    assert endless.wait() == 0, endless.log.read_text()[-4000:]
    said = endless.log.read_text()
    assert "(restart 1 of at most 1)" in said and complaints(said) == []
    deadline = time.monotonic() + 10  # W&B's process notices that its run is gone
    while any(map(is_alive, endless.below)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(is_alive, endless.below))
    last = last_of(run)
    again = Command([*words, "--train-iters", str(last + 5)], tmp_path / "second.txt")
    started.append(again)
    assert again.wait() == 0, again.log.read_text()[-4000:]
    assert last_of(run) == last + 5 and complaints(again.log.read_text()) == []
    for name, read in figures_by_tracker(run, "mine", tmp_path / "trackio").items():
        check_store(name, read(), run)
