"""The process that renews the report of a run: when, and that it ends with the run, however that ends."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from unittest import mock

import pytest

from mindspeed_mm.checkpoint.lock_holder import LOCK, Holder
from mindspeed_mm.checkpoint.run_folder import ENDINGS
from mindspeed_mm.monitor.report.follower import ReportFollower
from mindspeed_mm.monitor.report.sink import ReportSink
from tests.support.processes import is_alive, processes_below
from tests.support.run_folders import step_line, write_lines, write_run

needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")


def state_in(page: str) -> str:
    """The words of a page about the state of its run."""
    return page.partition('<span class="state ')[2].partition("</span>")[0].partition(">")[2]


def test_a_report_is_renewed_when_there_is_something_new_and_at_the_end(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 3)
    follower = ReportFollower(folder, first_seconds=0.0, least_seconds=0.0, look_seconds=0.01)
    reading, writing = os.pipe()
    with mock.patch("time.process_time", return_value=0.0), mock.patch("signal.alarm"):
        thread = threading.Thread(target=follower.run, args=(reading,), daemon=True)
        thread.start()

        def wait_for(number: int) -> None:
            deadline = time.monotonic() + 30
            while follower.renewals < number and time.monotonic() < deadline:
                time.sleep(0.01)

        wait_for(1)
        time.sleep(0.1)
        assert follower.renewals == 1  # nothing is new
        assert state_in((folder / "report.html").read_text()) == "ended after step 3 of 100"
        assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(step_line(4)) + "\n")
        wait_for(2)
        assert "after step 4" in state_in((folder / "report.html").read_text())
        os.write(writing, b"\n")
        thread.join(30)
    os.close(reading)
    os.close(writing)
    assert follower.renewals == 3


def test_renewals_take_a_hundredth_of_a_core(tmp_path: Path) -> None:
    """What has taken 0.7 s of a core so far is followed by nothing before 70 s, and nothing before 30 s."""
    follower = ReportFollower(write_run(tmp_path / "run", 3))
    now = time.monotonic()
    assert 4 < follower._due - now < 6
    follower.renew()
    for used, least, most in ((0.1, 29, 31), (0.7, 69, 71)):
        with mock.patch("time.process_time", return_value=used):
            assert least < follower._due - now < most


def test_a_report_that_cannot_be_made_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", 3)
    follower = ReportFollower(folder)
    with mock.patch("mindspeed_mm.monitor.report.follower.page_of", side_effect=OSError(28, "No space left on device")):
        follower.renew()
        follower.renew()
    said = f"the report in '{folder}' can't be renewed (OSError: [Errno 28] No space left on device)\n"
    assert capsys.readouterr().err == said
    follower.renew()
    assert (folder / "report.html").exists()


@needs_proc
def test_the_end_of_a_run_waits_for_the_last_renewal_and_leaves_no_process(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 3, endings=[{"state": "finished", "time": "2026-01-02T03:09:00+00:00"}])
    others = processes_below(os.getpid())
    sink = ReportSink(str(folder))
    below = processes_below(os.getpid()).keys() - others.keys()
    assert sink._process is not None and sink._process.stdin is not None
    worker = subprocess.Popen(["sleep", "60"], pass_fds=[sink._process.stdin.fileno()])  # has the pipe open, too
    with mock.patch.object(sink, "_say_why") as said:
        sink.close()
    worker.kill()
    worker.wait()
    said.assert_not_called()
    assert state_in((folder / "report.html").read_text()) == "finished: step 3 of 100"
    assert below and not any(map(is_alive, below))
    sink.close()  # nothing more to close


#: a rank that logs: it starts the process, holds the lock of the run folder if it is rank 0, and has a child that
#: keeps the pipe open, as workers of the loader do
RANK = """
import dataclasses, json, os, sys, time
from pathlib import Path
from mindspeed_mm.checkpoint.lock_holder import LOCK, Holder
from mindspeed_mm.monitor.report.sink import ReportSink
folder = sys.argv[1]
if sys.argv[2] == "0":
    Path(folder, LOCK).write_text(json.dumps(dataclasses.asdict(Holder.this_process())))
sink = ReportSink(folder)
child = os.fork()
if child:
    print(child, sink._process.pid, flush=True)
time.sleep(60)
"""


class LoggingRank:
    """A process that logs, with the one that renews its report."""

    def __init__(self, folder: Path, number: int) -> None:
        words = [sys.executable, "-c", RANK, str(folder), str(number)]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.child, self.follower = map(int, self.process.stdout.readline().split())

    def kill(self) -> None:
        time.sleep(0.5)  # the other one has been started
        self.process.kill()
        self.process.wait()

    def ends(self, seconds: float) -> bool:
        """Whether the one that renews the report ends in time."""
        deadline = time.monotonic() + seconds
        while is_alive(self.follower) and time.monotonic() < deadline:
            time.sleep(0.05)
        return not is_alive(self.follower)

    def close(self) -> None:
        for pid in (self.process.pid, self.child, self.follower):
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)


@needs_proc
def test_the_process_of_a_run_that_is_killed_shows_that_and_ends(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 3)
    with closing(LoggingRank(folder, 0)) as rank:
        rank.kill()
        assert rank.ends(60)
    page = (folder / "report.html").read_text()
    assert state_in(page) == "crashed after step 3 of 100" and "ended without a word" in page


@needs_proc
@pytest.mark.parametrize("restarts", [False, True])
def test_it_waits_for_the_other_ranks_of_a_run_one_of_which_is_killed(tmp_path: Path, restarts: bool) -> None:
    """Rank 0 lives a while longer and tells the error; if all start again, the folder is another process's."""
    folder = write_run(tmp_path / "run", 3)
    lock = folder / LOCK
    lock.write_text(json.dumps(dataclasses.asdict(Holder.this_process())))
    with closing(LoggingRank(folder, 1)) as rank:
        rank.kill()
        assert not rank.ends(1.5) and not (folder / "report.html").exists()
        if restarts:
            lock.write_text(json.dumps(dataclasses.asdict(Holder.this_process())))
        else:
            line = {"state": "failed", "rank": 0, "why": "the other rank is gone", "time": "2026-01-02T03:09:00+00:00"}
            write_lines(folder / ENDINGS, [line])
        assert rank.ends(60)
    assert (folder / "report.html").exists() != restarts
    if not restarts:
        assert "rank 0: the other rank is gone" in (folder / "report.html").read_text()
