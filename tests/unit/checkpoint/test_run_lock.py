"""One run at a time in a run folder: who lives is never disturbed, who was killed is replaced."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.checkpoint.lock_holder import LOCK, Holder, process_start
from mindspeed_mm.checkpoint.run_lock import RunLock, lock_run_folder
from mindspeed_mm.utils.errors import CheckpointError, ConfigError


def forked(fn: Callable[[], Any], stays: bool = False) -> tuple[int, str]:
    """Run `fn` in a process of its own; its id, and what `fn` returned or raised; `stays`: it is still there then."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            answer = str(fn())
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(writer, f"{answer}\n".encode())
        time.sleep(60 if stays else 0)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        answer = file.readline().strip()  # not to the end, which a process forked meanwhile holds open
    if not stays:
        os.waitpid(pid, 0)
    return pid, answer


def take(folder: Path) -> str:
    RunLock(folder).__enter__()
    return "taken"


def write_lock(folder: Path, **changes: Any) -> Holder:
    """A lock as another run left it, or holds it."""
    holder = dataclasses.replace(Holder.this_process(), token="theirs", **changes)
    folder.mkdir(exist_ok=True)
    (folder / LOCK).write_text(json.dumps(dataclasses.asdict(holder)))
    return holder


def test_a_second_run_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    run = tmp_path / "run"
    pid, answer = forked(lambda: take(run), stays=True)
    try:
        assert answer == "taken"
        told = (
            rf"--save '{re.escape(str(run))}' is in use by another run: process {pid} on \S+, which took it at 20\d\d-"
        )
        with pytest.raises(ConfigError, match=told), RunLock(run):
            pass
        assert [p.name for p in run.iterdir()] == [LOCK]
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_folder_is_given_back_however_the_run_ends(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(ZeroDivisionError), RunLock(run):
        assert (run / LOCK).exists()
        raise ZeroDivisionError
    assert not run.exists()  # made by the run, and empty
    with RunLock(run):
        (run / "metrics.jsonl").touch()
    assert [p.name for p in run.iterdir()] == ["metrics.jsonl"]


def test_a_killed_run_of_this_machine_is_replaced_at_once(tmp_path: Path, said: list[str]) -> None:
    pid, _ = forked(lambda: take(tmp_path))
    started = time.monotonic()
    with RunLock(tmp_path):
        pass
    assert time.monotonic() - started < 2
    (sentence,) = said
    assert f"was held by process {pid} on" in sentence and "has ended, and this run takes over" in sentence


def test_a_process_number_that_was_given_out_again_is_another_process(tmp_path: Path) -> None:
    if not process_start(os.getpid()):
        pytest.skip("this system does not say when a process started")
    write_lock(tmp_path, started="1")
    with RunLock(tmp_path):
        pass
    write_lock(tmp_path)
    with pytest.raises(ConfigError), RunLock(tmp_path):
        pass


def test_what_torchrun_starts_again_takes_its_own_lock_without_a_word(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    pid, _ = forked(time.monotonic)
    write_lock(tmp_path, pid=pid, launcher=Holder.this_process().launcher)
    with RunLock(tmp_path):
        pass
    assert said == []


@pytest.mark.parametrize("lives", [True, False], ids=["lives", "killed"])
@pytest.mark.parametrize("clock", [-3600, 3600], ids=["clock_behind", "clock_ahead"])
def test_a_run_of_another_machine_is_watched(tmp_path: Path, said: list[str], lives: bool, clock: int) -> None:
    """Its heartbeat goes on, or doesn't, whatever its clock says and whether a process of that number is here."""
    write_lock(tmp_path, host="elsewhere", machine="elsewhere")
    over = threading.Event()

    def beat() -> None:
        while not over.wait(0.02):
            now = time.time() + clock
            os.utime(tmp_path / LOCK, (now, now))

    os.utime(tmp_path / LOCK, (time.time() + clock,) * 2)
    heart = threading.Thread(target=beat)
    if lives:
        heart.start()
    try:
        lock = RunLock(tmp_path, beat_seconds=0.05, patience_seconds=0.3)
        if lives:
            with pytest.raises(ConfigError, match=r"in use by another run: process \d+ on elsewhere"), lock:
                pass
        else:
            with lock:
                lock.check()
            assert "no sign of life for 0.3 s, and this run takes over" in said[-1]
    finally:
        over.set()
        if lives:
            heart.join()


def test_a_heartbeat_is_seen_by_who_watches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides are ours here; the second takes itself for another machine."""
    with RunLock(tmp_path, beat_seconds=0.05) as lock:
        monkeypatch.setattr("mindspeed_mm.checkpoint.lock_holder.machine_identity", lambda: "elsewhere")
        with pytest.raises(ConfigError, match="is alive"), RunLock(tmp_path, beat_seconds=0.05, patience_seconds=5):
            pass
        lock.check()


def test_content_that_a_crash_has_cut_is_watched_too(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text('{"host": "a')
    with RunLock(tmp_path, beat_seconds=0.05, patience_seconds=0.2) as lock:
        lock.check()


def test_who_was_taken_for_dead_writes_nothing_any_more(tmp_path: Path) -> None:
    with RunLock(tmp_path, beat_seconds=0.02) as lock:
        lock.check()
        write_lock(tmp_path, host="elsewhere")
        deadline = time.monotonic() + 5
        while not lock.is_lost and time.monotonic() < deadline:
            time.sleep(0.01)
        assert lock.is_lost
        with pytest.raises(CheckpointError, match=r"now belongs to another run.*on elsewhere"):
            lock.check()
    assert json.loads((tmp_path / LOCK).read_text())["host"] == "elsewhere"  # not given back for another


def test_a_lock_that_somebody_removed_comes_back(tmp_path: Path) -> None:
    with RunLock(tmp_path) as lock:
        (tmp_path / LOCK).unlink()
        lock.check()
        assert (tmp_path / LOCK).exists()


@pytest.mark.parametrize("dead", [True, False], ids=["left_by_a_killed_run", "free"])
@pytest.mark.parametrize("links", [True, False], ids=["links", "no_links"])
def test_of_many_that_want_it_one_gets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dead: bool, links: bool
) -> None:
    if not links:

        def link(*args: Any) -> None:
            raise OSError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr(os, "link", link)
    if dead:
        forked(lambda: take(tmp_path))
    go = time.time() + 0.2

    def contend() -> str:
        time.sleep(max(0.0, go - time.time()))
        return take(tmp_path)

    answers: list[tuple[int, str]] = []
    threads = [threading.Thread(target=lambda: answers.append(forked(contend, stays=True))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for pid, _ in answers:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    got = [answer for _, answer in answers if answer == "taken"]
    assert len(got) == 1 and len(answers) == 6, answers
    assert all(answer.startswith("ConfigError: --save") for _, answer in answers if answer != "taken")
    assert [p.name for p in tmp_path.iterdir()] == [LOCK]


def test_a_refusal_is_heard_on_all_ranks_and_leftovers_go(tmp_path: Path) -> None:
    (tmp_path / ".iter_0000002.saving").mkdir()
    with lock_run_folder(str(tmp_path), 0, lambda value: [value, None]) as lock:
        assert lock is not None and [p.name for p in tmp_path.iterdir()] == [LOCK]
    with pytest.raises(ConfigError, match="is in use"), lock_run_folder(str(tmp_path), 1, lambda value: ["is in use"]):
        pass
    with lock_run_folder(None, 0, lambda value: [value]) as lock:
        assert lock is None


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"Not a directory: .*file"):
        lock_run_folder(str(tmp_path / "file" / "run"), 0, lambda value: [value]).__enter__()
