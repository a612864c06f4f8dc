"""A restart goes on from the checkpoint of its own launch, and from no other's."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from mindspeed_mm.checkpoint.attempts import continued, is_own
from mindspeed_mm.checkpoint.launch_record import record_launch
from mindspeed_mm.checkpoint.run_folder import LAUNCH, TRACKER, read_record
from mindspeed_mm.configs.run import Run
from mindspeed_mm.configs.written_run import written_run
from mindspeed_mm.utils.launch import Launch
from tests.support.runs import run_of


@pytest.fixture
def noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder with the note of this launch, whose id is `mine`."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    record_launch(tmp_path, run_of(save=str(tmp_path)), iteration=0)
    return tmp_path


def restarted(save: Path, restarts: int = 1) -> Run:
    flags = {"load": "weights", "finetune": True, "overwrite": True, "no_load_optim": True}
    return replace(run_of(save=str(save), **flags), launch=Launch(restarts=restarts))


def test_an_attempt_knows_its_own_launch(noted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_own(noted, 1) and not is_own(noted, 0)
    found = json.loads((noted / LAUNCH).read_text())
    changed = {**found, "launch": {**found["launch"], "launcher": "1 2"}}
    (noted / LAUNCH).write_text(json.dumps(changed))
    assert not is_own(noted, 1)  # an earlier launch of this machine, under the same --rdzv-id
    changed["launch"]["machine"] = "another"
    (noted / LAUNCH).write_text(json.dumps(changed))
    assert is_own(noted, 1)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "other")
    assert not is_own(noted, 1)
    (noted / LAUNCH).write_text("{")
    assert not is_own(noted, 1)


def test_a_restart_goes_on_from_its_own_checkpoint(noted: Path) -> None:
    run = restarted(noted)
    assert continued(run) is run  # it failed before its first checkpoint
    (noted / "iter_0000002").mkdir()
    (noted / TRACKER).write_text("2")
    checkpoint = continued(run).checkpoint
    assert checkpoint.load == str(noted)
    assert not (checkpoint.finetune or checkpoint.overwrite or checkpoint.no_load_optim)
    first = restarted(noted, restarts=0)
    assert continued(first) is first


@pytest.mark.parametrize(("load", "is_written"), [("run", False), ("weights", True)])
def test_another_start_does_not_go_on_with_this_run(load: str, is_written: bool, tmp_path: Path) -> None:
    """One command may both start a run and resume it; under another --save, its run.yaml starts it."""
    flags = {"save": str(tmp_path / "run"), "load": str(tmp_path / load)}
    run = replace(run_of(**flags), given=flags)
    assert ("load" in yaml.safe_load(written_run(run, ""))["gpt_args"]) is is_written


def test_a_file_that_alone_starts_a_run_keeps_its_comments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, own = tmp_path / "run.yaml", "# mine\ngpt_args: {}\n"
    file.write_text(own)
    for words in ([], ["--overwrite"], ["--load", str(tmp_path)]):
        monkeypatch.setattr(sys, "argv", ["train", str(file), *words])
        record_launch(tmp_path, run_of(save=str(tmp_path)), iteration=0)
        assert file.read_text() == own
    monkeypatch.setattr(sys, "argv", ["train", str(file), "gpt_args.lr=1"])
    for _ in range(2):
        record_launch(tmp_path, run_of(save=str(tmp_path)), iteration=0)
        assert file.read_text().startswith("# Started on 1 processes")
        assert (tmp_path / "run.own.yaml").read_text() == own


def test_the_state_of_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit, and whether any file differs from it, an untracked one included; nothing before the first commit."""

    def git(*words: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
        return subprocess.run(["git", *identity, *words], capture_output=True, text=True, check=True).stdout.strip()

    def state() -> object:
        record_launch(tmp_path / "run", run_of(save=str(tmp_path / "run")), iteration=0)
        return read_record(tmp_path / "run")["starts"][-1]["git"]

    (tmp_path / "work").mkdir()
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert state() is None
    git("init")
    assert state() is None
    git("commit", "--allow-empty", "-m", "first")
    assert state() == {"commit": git("rev-parse", "HEAD"), "is_changed": False}
    Path("new").touch()
    assert state() == {"commit": git("rev-parse", "HEAD"), "is_changed": True}
    git("add", "new")
    assert state() == {"commit": git("rev-parse", "HEAD"), "is_changed": True}
