"""The file of answers: one JSON object a line, shared by processes, continued after an interruption.

While a launch runs, each process appends the lines of its answers to a part (`answers.jsonl.part0`); when all requests
are answered, the parts become `answers.jsonl`, in the order of the requests. `answers.jsonl.settings` says what the
answers were generated from, so that a launch with other settings doesn't continue them.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindspeed_mm.utils.errors import ConfigError, DataError
from mindspeed_mm.utils.files import replace_file, write_json
from mindspeed_mm.utils.log import info_rank0

Line = dict[str, Any]
_INDEX = "index"


class AnswersFile:
    """A file of answers.

    Args:
        path: the file.
        rank: number of this process, which writes a part of its own.
    """

    def __init__(self, path: Path, rank: int = 0) -> None:
        self.path = path
        self._settings = path.with_name(path.name + ".settings")
        self._part = path.with_name(f"{path.name}.part{rank}")
        self._file: int | None = None

    def begin(self, settings: Mapping[str, Any], *, overwrite: bool = False) -> set[int]:
        """Prepare the file for a launch; called by one process, before any `open`.

        Args:
            settings: what determines the answers, as JSON.
            overwrite: remove the answers that are there.

        Returns:
            the indices of the requests that an earlier launch has answered.

        Raises:
            ConfigError: there are answers of other settings, or another launch writes to the file now.
            DataError: a line can't be read.
        """
        parts = self._parts()
        for part in parts:
            _refuse_locked(part)
        if overwrite:
            for file in (self.path, *parts, self._settings):
                file.unlink(missing_ok=True)
            parts = []
        known = json.loads(json.dumps(dict(settings)))  # tuples become lists
        earlier = [file for file in (self.path, *parts) if file.exists()]
        if earlier:
            self._refuse_other(known, earlier[0])
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for part in parts:
            _drop_torn_line(part)
        done = {line[_INDEX] for file in earlier for line in read_lines(file)}
        write_json(self._settings, known)
        if done:
            info_rank0(f"'{self.path}': {len(done)} answers are there")
        return done

    def _refuse_other(self, settings: Mapping[str, Any], file: Path) -> None:
        advice = "give another --output, or add --overwrite to answer anew"
        try:
            before = json.loads(self._settings.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise ConfigError(
                f"--output '{self.path}': '{file}' is there, and no {self._settings.name} says where its answers come "
                f"from; {advice}"
            ) from None
        for key in sorted(settings.keys() | before.keys()):
            if settings.get(key) != before.get(key):
                raise ConfigError(
                    f"--output '{self.path}' holds answers with {key} {json.dumps(before.get(key), ensure_ascii=False)}"
                    f", now it is {json.dumps(settings.get(key), ensure_ascii=False)}; {advice}"
                )

    def open(self) -> None:
        """Open this process's part, and keep other launches from writing to it."""
        self._file = os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def write(self, lines: list[Line]) -> None:
        """Append whole lines."""
        assert self._file is not None, "open() comes first"
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode("utf-8")
        while text:
            text = text[os.write(self._file, text) :]

    def close(self) -> None:
        """Make this process's part durable, and let go of it."""
        if self._file is not None:
            os.fsync(self._file)
            os.close(self._file)
            self._file = None

    def finish(self, count: int) -> list[Line]:
        """Put the parts together, in the order of the requests; called by one process, after all have closed theirs.

        Args:
            count: number of requests.

        Returns:
            the lines of the file.

        Raises:
            DataError: a request has no line: a part of another machine isn't in this folder.
        """
        parts = self._parts()
        files = [file for file in (self.path, *parts) if file.exists()]
        lines = {line[_INDEX]: line for file in files for line in read_lines(file)}
        if missing := [index for index in range(count) if index not in lines]:
            raise DataError(
                f"'{self.path}': {len(missing)} of {count} answers are missing, the first is that of request "
                f"{missing[0]}; machines of one launch must share the folder"
            )
        ordered = [lines[index] for index in range(count)]
        if parts:
            replace_file(self.path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in ordered))
        for part in parts:
            part.unlink()
        return ordered

    def _parts(self) -> list[Path]:
        return sorted(self.path.parent.glob(f"{_escaped(self.path.name)}.part*"))


def read_lines(path: Path) -> list[Line]:
    """Return the lines of a file of answers.

    Raises:
        DataError: a line is none of an answer.
    """
    lines = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            line = json.loads(text)
            if not isinstance(line[_INDEX], int):
                raise ValueError(f"'{_INDEX}' is no whole number")
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}, line {number}: no answer of an earlier launch: {error}") from None
        lines.append(line)
    return lines


def _escaped(name: str) -> str:
    return "".join(f"[{character}]" if character in "*?[" else character for character in name)


def _refuse_locked(part: Path) -> None:
    with open(part, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"--output: another process is writing '{part}'; wait for it, or end it, or give another --output"
            ) from None


def _drop_torn_line(part: Path) -> None:
    """Remove what a killed process has left behind the last line break."""
    with open(part, "rb+") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)
