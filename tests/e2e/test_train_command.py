"""`mindspeed-mm train`: it starts, stops and restarts the processes of a run, as launched by each of its doors."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from mindspeed_mm.monitor.metrics import read_metrics
from tests.support.launch import WRAP_TEXT, launch_flags, run_entry, write_run_files
from tests.support.processes import free_port, is_alive
from tests.support.tiny import write_mixed_dataset
from tests.support.train_command import Command, last_of, losses_of
from tests.support.workers import RankPool

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")


@pytest.fixture(scope="module")
def flags(qwen3_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Those of a run that goes on until it is stopped."""
    folder = tmp_path_factory.mktemp("train")
    data = write_mixed_dataset(folder / "data", rows=14, images=False)
    files = write_run_files(folder, qwen3_dir, data, fsdp2={"sub_modules_to_wrap": WRAP_TEXT})
    return launch_flags(files, micro_batch_size=1, global_batch_size=4, save_interval=100_000, no_report=False)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[Command]]:
    commands: list[Command] = []
    yield commands
    for command in commands:
        command.kill()


def test_two_nodes_have_the_losses_of_one_and_end_on_a_signal_to_either(
    flags: list[str], ranks2: RankPool, started: list[Command], tmp_path: Path
) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    words = ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "pair"]
    words += ["pretrain_transformers.py", *flags, "--train-iters", "100000", "--save", str(run)]
    started += [Command(words, tmp_path / f"{node}.txt") for node in range(2)]
    started[0].wait_for(run, 4)
    os.kill(started[1].process.pid, signal.SIGUSR1)
    assert [command.wait() for command in started] == [0, 0], [command.log.read_text() for command in started]
    assert not any(map(is_alive, started[0].below))
    last = last_of(run)
    assert (run / f"iter_{last:07d}" / "manifest.json").is_file()
    ranks2.run(run_entry, [*flags, "--no-report", "--train-iters", str(last), "--save", str(whole)], timeout=120)
    assert losses_of(run) == losses_of(whole)
    (end,) = read_metrics(run / "report" / "endings.jsonl")
    assert (end["state"], end["iteration"]) == ("stopped", last)
    assert f"stopped after step {last} of 100,000" in (run / "report.html").read_text(encoding="utf-8")


def test_a_launch_script_goes_on_after_a_rank_is_killed(
    flags: list[str], ranks2: RankPool, started: list[Command], tmp_path: Path
) -> None:
    """The options before the script take the place of its own; tee hides the status of its torchrun."""
    run, whole, script = tmp_path / "run", tmp_path / "whole", tmp_path / "finetune.sh"
    flags = [*flags, "--train-iters", "40", "--save-interval", "3"]
    words = shlex.join([*flags, "--save", str(run), "--overwrite"])
    script.write_text(
        f"torchrun --nproc_per_node 8 --nnodes 1 pretrain_transformers.py {words} 2>&1 | tee -a {run}.log\n"
    )
    started.append(Command(["--nproc-per-node", "2", "--max-restarts", "1", str(script)], tmp_path / "log.txt"))
    started[0].wait_for(run, 7)
    os.kill(started[0].rank(1), signal.SIGKILL)
    assert started[0].wait() == 0, started[0].log.read_text()[-4000:]
    assert "(restart 1 of at most 1)" in started[0].log.read_text()
    ranks2.run(run_entry, [*flags, "--no-report", "--save", str(whole)], timeout=120)
    assert losses_of(run) == losses_of(whole)
    assert not any(map(is_alive, started[0].below))
    ends = [(line["state"], line["rank"]) for line in read_metrics(run / "report" / "endings.jsonl")]
    assert ends == [("failed", 0), ("finished", 0)]
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "finished: step 40 of 40" in page and "went on after step 6" in page
    assert not (whole / "report.html").exists()
