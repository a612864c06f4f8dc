"""A folder that can't be written is told before work begins, and a look at one leaves nothing behind."""

from __future__ import annotations

import builtins
import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.files import refuse_unwritable


def test_a_folder_that_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    refuse_unwritable(tmp_path / "a" / "b", "--save")
    (tmp_path / "link").symlink_to(tmp_path)
    refuse_unwritable(tmp_path / "link" / "run", "--save")
    assert [path.name for path in tmp_path.iterdir()] == ["link"]


@pytest.mark.parametrize("kind", ["a file", "a link to nothing"])
@pytest.mark.parametrize("below", ["", "a/run"], ids=["itself", "above it"])
def test_what_is_in_the_way_is_named(kind: str, below: str, tmp_path: Path) -> None:
    place = tmp_path / "runs"
    place.write_text("") if kind == "a file" else place.symlink_to(tmp_path / "gone")
    sentence = f"--save '{place / below}' can't be written: '{place}' is {kind}, expected a folder"
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        refuse_unwritable(place / below, "--save")


@pytest.mark.parametrize(
    "number, advice",
    [(errno.EACCES, "have it made"), (errno.EROFS, "have it made writable"), (errno.ENOSPC, "free some space")],
    ids=["permission", "read-only", "full"],
)
@pytest.mark.parametrize("call", ["open", "fsync"])
def test_a_folder_that_takes_no_file(
    number: int, advice: str, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(*((builtins, "open") if call == "open" else (os, "fsync")), fails)
    sentence = f"--save '{tmp_path / 'run'}' can't be written: no file can be made in '{tmp_path}' ("
    with pytest.raises(ConfigError, match=re.escape(f"{sentence}{os.strerror(number)}); {advice}")):
        refuse_unwritable(tmp_path / "run", "--save")
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []
