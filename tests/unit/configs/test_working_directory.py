"""Relative paths of a run.yaml start where the run was started, from whatever folder it is started again."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import yaml

from mindspeed_mm.configs.working_directory import enter_working_directory, named_from, working_directory_of
from mindspeed_mm.tools.train.target import find_target


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A run.yaml in proj/runs/one, of a run that was started in proj; the current folder is another one."""
    path = tmp_path / "proj/runs/one/run.yaml"
    path.parent.mkdir(parents=True)
    content = {"working_directory": str(tmp_path / "proj"), "gpt_args": {"save": "runs/one"}}
    path.write_text(yaml.safe_dump(content))
    (tmp_path / "here").mkdir()
    return path


def test_words_keep_their_folder(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of flags that are paths start at the folder before; those in the file's own words at the file's."""
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here/weights").mkdir()
    words = [
        "../proj/runs/one/run.yaml",
        "data.dataset=rows",
        "--save",
        "two",
        "--load=weights",
        "--lora_load",
        "hub/x",
    ]
    there = enter_working_directory(words)
    assert Path.cwd() == tmp_path / "proj"
    here = tmp_path / "here"
    assert there == [str(file), "data.dataset=rows", "--save", str(here / "two"), f"--load={here / 'weights'}",
                     "--lora_load", "hub/x"]  # fmt: skip
    assert enter_working_directory(there) == there


def test_a_moved_folder_is_found_by_its_run_folder(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path / "here")
    copy = tmp_path / "copy"
    shutil.copytree(file.parent, copy)
    assert working_directory_of(str(copy / "run.yaml")) == str(tmp_path / "proj")
    shutil.move(tmp_path / "proj", tmp_path / "moved")
    assert working_directory_of(str(tmp_path / "moved/runs/one/run.yaml")) == str(tmp_path / "moved")
    assert working_directory_of(str(copy / "run.yaml")) is None
    assert enter_working_directory([str(copy / "run.yaml"), "--save", "x"]) == [str(copy / "run.yaml"), "--save", "x"]
    assert Path.cwd() == tmp_path / "here"


def test_other_words_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").write_text("gpt_args: {save: runs/one}\n")
    for words in (["own.yaml", "--save", "x"], ["--save", "x"], []):
        assert enter_working_directory(words) == words and Path.cwd() == tmp_path


def test_a_run_folder_names_its_script_and_its_folder(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by its file, and also of a file that somebody wrote, which names no folder: launch.json does."""
    start = f'{{"program": ["mine.py"], "working_directory": "{tmp_path / "proj"}", "processes_per_machine": 2}}'
    (file.parent / "launch.json").write_text(f'{{"starts": [{start}]}}')
    monkeypatch.chdir(tmp_path / "here")
    for text in (file.read_text(), "gpt_args: {save: runs/one}\n"):
        file.write_text(text)
        for name in (str(file.parent), os.path.relpath(file)):
            target = find_target(name, ["--save", "two"])
            assert target.words == ("mine.py", str(file), "--save", str(tmp_path / "here/two"))
            assert (target.folder, target.processes) == (str(tmp_path / "proj"), 2)


def test_names_within_a_folder(tmp_path: Path) -> None:
    folder = str(tmp_path)
    assert named_from(folder, str(tmp_path / "runs/x")) == "runs/x"
    for other in (str(tmp_path.parent / "x"), "", None):
        assert named_from(folder, other) == other
