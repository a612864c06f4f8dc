"""A run's end and its continuation, with real torchrun processes: killed, resumed, asked to stop.

The processes of a run are killed with SIGKILL. Then torchrun launches its command on its run folder, and on a copy of
it: one of them is ended by a SIGINT to torchrun, as Ctrl-C is one, the other by a SIGTERM to its workers. What they
logged must be, bit for bit, what an unbroken run logs.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.monitor.metrics import read_metrics
from tests.support.launch import ROOT, WRAP_TEXT, launch_flags, run_entry, write_run_files
from tests.support.processes import is_alive, processes_below
from tests.support.tiny import write_mixed_dataset
from tests.support.workers import RankError, RankPool

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
SAVE_INTERVAL = 8  # the kill comes a few steps after a save, and long before the next

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")


@dataclass
class Running:
    """One run of the command.

    Attributes:
        words: of the command line, after the script's name.
        run: the run folder.
        ranks, loaders: ids of the training processes and of their data loaders' workers.
    """

    words: list[str]
    run: Path
    ranks: list[int] = field(default_factory=list, kw_only=True)
    loaders: list[int] = field(default_factory=list, kw_only=True)

    def records(self) -> list[dict[str, Any]]:
        path = self.run / "metrics.jsonl"
        return read_metrics(path) if path.exists() else []

    def last(self) -> int:
        """The last iteration that was logged."""
        return max((r["iteration"] for r in self.records()[-1:]), default=0)

    def saved(self) -> int:
        """The iteration of the visible checkpoint."""
        tracker = self.run / "latest_checkpointed_iteration.txt"
        return int(tracker.read_text()) if tracker.exists() else 0

    def end_what_is_left(self) -> None:
        for pid in (*self.ranks, *self.loaders):
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)


@dataclass
class Killed(Running):
    """A run in workers that are there already."""

    def kill_after_save(self, pool: RankPool, steps: int) -> None:
        """Run until `steps` more than a checkpoint has are logged; then SIGKILL to the ranks, and to no loader."""
        pool.run(os.getpid)  # starts the workers
        self.ranks = pool.pids
        over = threading.Event()

        def watch() -> None:
            while not over.is_set() and not 0 < self.saved() <= self.last() - steps:
                time.sleep(0.01)
            self.loaders = [pid for rank in self.ranks for pid in processes_below(rank)[rank]]
            for pid in self.ranks:
                os.kill(pid, signal.SIGKILL)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            with pytest.raises(RankError, match="died with exit code -9"):
                pool.run(run_entry, self.words, timeout=120)
        finally:
            over.set()
            watcher.join()


@dataclass
class Launch(Running):
    """One launch of the command with torchrun.

    Attributes:
        log: what it printed.
        status: torchrun's exit status; negative: ended by that signal.
        script: that torchrun starts.
    """

    log: Path
    status: int = 0
    script: Path = ROOT / "pretrain_transformers.py"

    def __post_init__(self) -> None:
        with open(self.log, "wb") as output:
            self.process = subprocess.Popen(
                [*TORCHRUN, str(self.script), *self.words],
                cwd=ROOT,
                env=ENVIRONMENT,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_for_step(self, number: int) -> None:
        """Wait until iteration `number` is logged."""
        deadline = time.monotonic() + 120
        while self.last() < number:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"ended or hangs:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.01)
        tree = processes_below(self.process.pid)
        self.ranks = tree[self.process.pid]
        self.loaders = [pid for rank in self.ranks for pid in tree[rank]]

    def stop_torchrun(self) -> None:
        """SIGINT to torchrun, which sends it on; a terminal's Ctrl-C reaches torchrun alone, too."""
        os.kill(self.process.pid, signal.SIGINT)

    def stop_workers(self) -> None:
        """SIGTERM to each rank's process group, its loader's workers included, as a scheduler signals a whole job."""
        for pid in self.ranks:
            os.killpg(pid, signal.SIGTERM)

    def wait(self) -> None:
        self.status = self.process.wait(timeout=60)

    def leave_nothing(self) -> None:
        """End what is still there, whatever failed."""
        for pid in processes_below(self.process.pid) if self.process.poll() is None else ():
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.end_what_is_left()
        self.process.wait()


@dataclass
class Story:
    """The runs, and what the first one had logged and saved when it was killed."""

    killed: Killed
    torchrun_stopped: Launch
    workers_stopped: Launch
    killed_last: int
    killed_saved: int


@pytest.fixture(scope="module")
def story(qwen3_dir: Path, ranks2: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("launch")
    data = write_mixed_dataset(folder / "data", rows=14, images=False)
    files = write_run_files(folder, qwen3_dir, data, fsdp2={"sub_modules_to_wrap": WRAP_TEXT})
    run, copy = folder / "run", folder / "copy"
    settings: dict[str, Any] = {"micro_batch_size": 1, "global_batch_size": 4, "train_iters": 100_000}
    settings |= {"save_interval": SAVE_INTERVAL, "num_workers": 1}
    words = launch_flags(files, **settings, save=run, load=run)
    launches = []
    killed = Killed(words, run)
    try:
        killed.kill_after_save(ranks2, steps=2)
        last, saved = killed.last(), killed.saved()
        shutil.copytree(run, copy)
        launches.append(first := Launch(words, run, folder / "torchrun.txt"))
        launches.append(
            second := Launch(launch_flags(files, **settings, save=copy, load=copy), copy, folder / "workers.txt")
        )
        first.wait_for_step(last + 2)
        first.stop_torchrun()
        second.wait_for_step(last + 2)
        second.stop_workers()
        first.wait()
        second.wait()
        yield Story(killed, first, second, last, saved)
    finally:
        killed.end_what_is_left()
        for launch in launches:
            launch.leave_nothing()


def test_killed_and_resumed_goes_on_bit_for_bit(story: Story, ranks2: RankPool) -> None:
    """Iterations that were done again and those after them have the losses and norms of an unbroken run."""
    assert story.killed_saved % SAVE_INTERVAL == 0 and story.killed_saved + 2 <= story.killed_last
    last = max(story.torchrun_stopped.last(), story.workers_stopped.last())
    unbroken = story.killed.run.with_name("unbroken")
    words = [str(unbroken) if word == str(story.killed.run) else word for word in story.killed.words]
    words[words.index("--num-workers") + 1] = "0"
    words[words.index("--save-interval") + 1] = "1000000"
    ranks2.run(run_entry, [*words, "--exit-interval", str(last)])
    expected = {r["iteration"]: (r["loss"], r["grad_norm"]) for r in read_metrics(unbroken / "metrics.jsonl")}
    assert len(expected) == last
    for launch in (story.torchrun_stopped, story.workers_stopped):
        found = [(r["iteration"], (r["loss"], r["grad_norm"])) for r in launch.records()]
        assert [f for f in found if f[1] != expected[f[0]]] == []
        again = list(range(1, story.killed_last + 1)) + list(range(story.killed_saved + 1, launch.last() + 1))
        assert [iteration for iteration, _ in found] == again


@pytest.mark.parametrize("name", ["torchrun_stopped", "workers_stopped"])
def test_a_stop_leaves_a_checkpoint_of_the_last_step(story: Story, name: str) -> None:
    launch: Launch = getattr(story, name)
    assert launch.saved() == launch.last() > story.killed_last
    checkpoint = launch.run / f"iter_{launch.saved():07d}"
    assert (checkpoint / ".metadata").exists()
    assert f"saved checkpoint {checkpoint}" in launch.log.read_text()


def test_exit_status(story: Story) -> None:
    """Workers that were asked to stop exit with 0, and so does torchrun; asked itself, torchrun reports the signal."""
    assert story.workers_stopped.status == 0
    assert "Traceback" not in story.workers_stopped.log.read_text()
    assert story.torchrun_stopped.status == 1
    output = story.torchrun_stopped.log.read_text()
    assert output.count("Traceback") == 1  # its own
    assert f"SignalException: Process {story.torchrun_stopped.process.pid} got signal: 2" in output


@pytest.mark.parametrize("name, signal_name", [("torchrun_stopped", "SIGINT (Ctrl-C)"), ("workers_stopped", "SIGTERM")])
def test_one_line_says_how_to_go_on(story: Story, name: str, signal_name: str) -> None:
    launch: Launch = getattr(story, name)
    output = launch.log.read_text()
    assert output.count(f"{signal_name}: a checkpoint is saved after the running step") == 1
    assert output.count("the same command goes on from it") == 1
    line = f"{signal_name}: ended after iteration {launch.last()} of 100000; its checkpoint is in '{launch.run}'"
    assert line in output


@pytest.mark.parametrize("name", ["killed", "torchrun_stopped", "workers_stopped"])
def test_no_process_is_left(story: Story, name: str) -> None:
    """Data workers end with their rank, even when it was killed and could not tell them."""
    launch: Running = getattr(story, name)
    assert len(launch.ranks) == len(launch.loaders) == 2
    deadline = time.monotonic() + 15
    while any(map(is_alive, launch.ranks + launch.loaders)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [pid for pid in launch.ranks + launch.loaders if is_alive(pid)] == []


@pytest.mark.full
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_a_script_of_ones_own_is_stopped_as_ours_are(name: str, tmp_path: Path) -> None:
    """SIGTERM as a scheduler sends it: to every process at once, and torchrun sends it on to the ranks once more.

    SIGUSR1 to torchrun alone kills torchrun, and its ranks end, with nothing left that is half written.
    """
    script = ROOT / "tests/fixtures/user_scripts/pretrain_with_faults.py"
    (plan := tmp_path / "fsdp2.yaml").write_text("sharding_size: auto\nsub_modules_to_wrap:\n  - layer\n")
    files: dict[str, Any] = {"fsdp2.yaml": plan, "model.json": None, "data.json": None, "tools.json": None}
    run = tmp_path / "run"
    settings: dict[str, Any] = {"micro_batch_size": 1, "global_batch_size": 2, "train_iters": 1_000_000, "save": run}
    words = launch_flags(files, **settings, num_workers=1)
    launch = Launch(words, run, tmp_path / "log.txt", script=script)
    try:
        launch.wait_for_step(2)
        if name == "SIGTERM":
            launch.stop_workers()
        os.kill(launch.process.pid, getattr(signal, name))
        launch.wait()
        deadline = time.monotonic() + 30
        while any(map(is_alive, launch.ranks + launch.loaders)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert [pid for pid in launch.ranks + launch.loaders if is_alive(pid)] == []
    finally:
        launch.leave_nothing()
    output = launch.log.read_text()
    if name == "SIGUSR1":
        assert launch.status == -signal.SIGUSR1 and launch.saved() == 0
        assert output.count("has ended without ending it; ending at once") == 1
        assert [path.name for path in run.iterdir() if path.name != "run.lock"] == ["metrics.jsonl"]
        return
    assert launch.status == (1 if name == "SIGINT" else launch.status)
    assert launch.saved() == launch.last() >= 2
    assert output.count(f"ended after iteration {launch.saved()} of 1000000; its checkpoint is in '{run}'") == 1
    assert "once more" not in output and output.count("Traceback") == (launch.status != 0)  # torchrun's own
