"""The process that renews the report of a run: when, and that it ends with the run, however that ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import pytest

from mindspeed_mm.monitor.report.follower import ReportFollower
from mindspeed_mm.monitor.report.sink import ReportSink
from tests.support.processes import is_alive, processes_below
from tests.support.run_folders import step_line, write_run

needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")


def state_in(page: str) -> str:
    """The words of a page about the state of its run."""
    return page.partition('<span class="state ')[2].partition("</span>")[0].partition(">")[2]


def test_a_report_is_renewed_when_there_is_something_new_and_at_the_end(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 3)
    follower = ReportFollower(folder, first_seconds=0.0, least_seconds=0.0, look_seconds=0.01)
    reading, writing = os.pipe()
    with mock.patch("time.process_time", return_value=0.0), mock.patch("signal.alarm"):
        thread = threading.Thread(target=follower.run, args=(reading,))
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
    sink = ReportSink(str(folder))
    below = processes_below(os.getpid())
    del below[os.getpid()]
    sink.close()
    assert state_in((folder / "report.html").read_text()) == "finished: step 3 of 100"
    assert below and not any(map(is_alive, below))
    sink.close()  # nothing more to close


@needs_proc
def test_the_process_of_a_run_that_is_killed_shows_that_and_ends(tmp_path: Path) -> None:
    """The run holds its lock, and a child of it has the pipe open for a while longer."""
    folder = write_run(tmp_path / "run", 3)
    program = f"""
import dataclasses, json, os, time
from pathlib import Path
from mindspeed_mm.checkpoint.lock_holder import LOCK, Holder
from mindspeed_mm.monitor.report.sink import ReportSink
folder = {str(folder)!r}
Path(folder, LOCK).write_text(json.dumps(dataclasses.asdict(Holder.this_process())))
sink = ReportSink(folder)
print(sink._process.pid, flush=True)
if os.fork() == 0:
    time.sleep(60)
    os._exit(0)
time.sleep(60)
"""
    run = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    follower = int(run.stdout.readline())
    children = processes_below(run.pid)
    time.sleep(0.5)  # it has been started
    run.kill()
    run.wait()
    deadline = time.monotonic() + 30
    while is_alive(follower) and time.monotonic() < deadline:
        time.sleep(0.05)
    for child in children:
        if is_alive(child):
            os.kill(child, signal.SIGKILL)
    assert not is_alive(follower)
    page = (folder / "report.html").read_text()
    assert state_in(page) == "crashed after step 3 of 100" and "ended without a word" in page
