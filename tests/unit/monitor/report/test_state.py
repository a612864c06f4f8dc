"""What becomes of a run: who writes it, and what a reader makes of what is there."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.checkpoint.lock_holder import LOCK, Holder
from mindspeed_mm.checkpoint.run_folder import ENDINGS
from mindspeed_mm.monitor.ending_record import EndingRecord, ending_record
from mindspeed_mm.monitor.report.lines import whole_lines
from mindspeed_mm.monitor.report.state import state_of
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.first_failure import claim
from tests.support.runs import run_of

STARTED = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)


def ended(save: Path, rank: int, error: BaseException | None = None, why: str | None = None) -> list[dict[str, Any]]:
    """What is in the file after a rank's training has ended; without its times."""
    expected = contextlib.nullcontext() if error is None else pytest.raises(type(error))
    with expected, EndingRecord(str(save), rank, lambda: 7) as ending:
        ending.why = why
        if error is not None:
            raise error
    return [{name: value for name, value in line.items() if name != "time"} for line in whole_lines(save / ENDINGS)]


def test_rank_0_writes_the_end_and_any_rank_its_failure(tmp_path: Path) -> None:
    assert ended(tmp_path, 1) == []
    assert ended(tmp_path, 0) == [{"state": "finished", "iteration": 7, "rank": 0, "why": None}]
    assert ended(tmp_path, 0, why="SIGTERM")[1:] == [{"state": "stopped", "iteration": 7, "rank": 0, "why": "SIGTERM"}]
    failed = ended(tmp_path, 3, ValueError("no such thing"))[2:]
    assert failed == [{"state": "failed", "iteration": 7, "rank": 3, "why": "ValueError: no such thing"}]
    lost = RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]")
    assert "this rank lost another one" in ended(tmp_path, 0, lost)[3]["why"]
    assert ended(tmp_path, 0, ConfigError("the row is bad"))[4]["why"] == "the row is bad"


@pytest.mark.parametrize("report", [True, False])
def test_a_run_without_a_report_has_no_record_of_its_end(tmp_path: Path, report: bool) -> None:
    with ending_record(run_of(save=str(tmp_path), report=report), lambda: 7):
        pass
    assert (tmp_path / ENDINGS).exists() == report


def test_ranks_that_fail_after_another_one_of_their_machine_write_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "attempt" / "1").mkdir(parents=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "attempt" / "1" / "error.json"))
    assert claim("the first") is None
    assert ended(tmp_path, 1, ValueError("a consequence")) == []


def test_a_full_disk_hides_no_error(tmp_path: Path) -> None:
    (tmp_path / "report").write_text("no folder")
    with pytest.raises(ValueError, match="what counts"), EndingRecord(str(tmp_path), 0, lambda: 7):
        raise ValueError("what counts")


def line(state: str, minutes: int, **more: Any) -> dict[str, Any]:
    return {"state": state, "time": (STARTED + datetime.timedelta(minutes=minutes)).isoformat(), "rank": 0, **more}


def test_the_first_failure_after_the_last_start_counts_and_else_the_last_line(tmp_path: Path) -> None:
    lines = [
        line("failed", -5, why="an earlier start"),
        line("failed", 5, why="no memory"),
        line("failed", 6, why="lost"),
    ]
    assert state_of(tmp_path, STARTED, lines).why == "rank 0: no memory"
    assert state_of(tmp_path, STARTED, lines).name == "crashed"
    assert state_of(tmp_path, STARTED, lines[:1]).name == "ended"
    stopped = state_of(tmp_path, STARTED, [line("stopped", 5, why="SIGTERM")])
    assert (stopped.name, stopped.why, stopped.since) == ("stopped", "SIGTERM", STARTED + datetime.timedelta(minutes=5))
    assert state_of(tmp_path, None, [line("stopped", 5), line("finished", 9)]).name == "finished"
    assert state_of(tmp_path, STARTED, [{"state": "finished"}, line("other", 7)]).name == "ended"


def lock(folder: Path, **changes: Any) -> None:
    holder = dataclasses.replace(Holder.this_process(), **changes)
    (folder / LOCK).write_text(json.dumps(dataclasses.asdict(holder)))


def test_without_a_line_the_lock_tells(tmp_path: Path) -> None:
    assert state_of(tmp_path, STARTED, []).name == "ended"
    lock(tmp_path)
    assert state_of(tmp_path, STARTED, [line("finished", -5)]).name == "running"
    gone = subprocess.Popen(["true"])
    gone.wait()
    lock(tmp_path, pid=gone.pid)
    killed = state_of(tmp_path, STARTED, [])
    assert killed.name == "crashed" and "ended without a word" in killed.why
    lock(tmp_path, pid=gone.pid, machine="another one")
    assert state_of(tmp_path, STARTED, []).name == "running"  # its heart has just beaten
    os.utime(tmp_path / LOCK, (0, 0))
    assert state_of(tmp_path, STARTED, []).name == "crashed"
    (tmp_path / LOCK).write_text("{")
    assert state_of(tmp_path, STARTED, []).name == "ended"
