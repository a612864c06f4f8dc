"""`mindspeed-mm train` as a process, and what its run has logged."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from mindspeed_mm.monitor.metrics import read_metrics
from tests.support.launch import ROOT
from tests.support.processes import environment_of, processes_below

_TRAIN = [sys.executable, "-m", "mindspeed_mm.tools.cli", "train"]
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


class Command:
    """A command line of `mindspeed-mm train`, in a session of its own.

    Args:
        words: those after `train`.
        log: where its output goes.
        errors: where its stderr goes; None: with the output.
        variables: added to its environment.
    """

    def __init__(self, words: list[str], log: Path, errors: Path | None = None, **variables: str) -> None:
        self.log = log
        with open(log, "wb") as output, open(errors or os.devnull, "wb") as separate:
            self.process = subprocess.Popen(
                [*_TRAIN, *words],
                cwd=ROOT,
                env={**os.environ, **_ENVIRONMENT, **variables},
                stdout=output,
                stderr=subprocess.STDOUT if errors is None else separate,
                start_new_session=True,
            )
        self.below: set[int] = set()

    def wait_for(self, run: Path, iteration: int) -> None:
        """Wait until the run in a folder has logged an iteration."""
        deadline = time.monotonic() + 120
        while not (run / "metrics.jsonl").exists() or last_of(run) < iteration:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"ended or hangs:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.01)
        self.below |= set(processes_below(self.process.pid))

    def rank(self, number: int) -> int:
        """Return the process id of a rank."""
        variable = f"\0LOCAL_RANK={number}\0".encode()
        tree = processes_below(self.process.pid)
        ranks = [pid for pid in tree if variable in environment_of(pid)]
        return next(pid for pid in ranks if not any(pid in tree[other] for other in ranks))  # no worker of its loader

    def wait(self) -> int:
        """Wait for the end, and return the status."""
        return self.process.wait(timeout=120)

    def kill(self) -> None:
        """End what still runs."""
        for pid in {*self.below, *(processes_below(self.process.pid) if self.process.poll() is None else ())}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def last_of(run: Path) -> int:
    """The last iteration that a run has logged."""
    return max((record["iteration"] for record in read_metrics(run / "metrics.jsonl")), default=0)


def losses_of(run: Path) -> dict[int, float]:
    """The loss of each iteration; of those that ran twice, the later one."""
    return {record["iteration"]: record["loss"] for record in read_metrics(run / "metrics.jsonl")}
