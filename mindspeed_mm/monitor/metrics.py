"""metrics.jsonl: one JSON object a logged step."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from mindspeed_mm.utils.log import logger

FILE_NAME = "metrics.jsonl"


class MetricsWriter:
    """Appends lines to `<save>/metrics.jsonl`; each is in the file when `write` returns."""

    def __init__(self, folder: str | Path, *, resumed: bool) -> None:
        """Open the file, repairing a last line that a kill tore.

        Args:
            resumed: whether this run continues the folder's run. Otherwise a file of an earlier run is kept under
                another name (metrics.1.jsonl, metrics.2.jsonl …) and a new one begun.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / FILE_NAME
        if path.exists():
            if resumed:
                repair_last_line(path)
            else:
                os.replace(path, _free_name(folder))
        # kept open over the run; the buffer holds what a full disk doesn't take at once
        self._file = open(path, "a", encoding="utf-8", buffering=1 << 20)  # noqa: SIM115
        self._is_behind = False

    def write(self, record: dict[str, Any]) -> None:
        """Append one record; numbers keep their full precision, non-finite ones become null.

        A disk that is full (a checkpoint being written may fill it for a while) does not end the training: the record
        follows as soon as there is space.
        """
        try:
            self._file.write(json.dumps(_plain(record), ensure_ascii=False) + "\n")
            self._file.flush()
            self._is_behind = False
        except OSError as error:
            self._say(error)

    def close(self) -> None:
        """Force the file to disk and close it."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        except OSError as error:
            self._say(error)

    def _say(self, error: OSError) -> None:
        if not self._is_behind:
            logger.error(
                f"'{self._file.name}' can't be written ({error}); training goes on, and its lines follow later"
            )
        self._is_behind = True


def repair_last_line(path: Path) -> None:
    """Cut off a last line that is no whole JSON object, so that readers never meet it."""
    with open(path, "rb+") as f:
        content = f.read()
        end = len(content)
        while end:
            start = content.rfind(b"\n", 0, end - 1) + 1
            line = content[start:end]
            if line.endswith(b"\n") and _is_json(line):
                break
            end = start
        if end != len(content):
            f.truncate(end)
            f.flush()
            os.fsync(f.fileno())


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """All whole records of a metrics.jsonl; a torn last line (of a run being written) is left out."""
    records = []
    for line in Path(path).read_text(encoding="utf-8").split("\n"):
        if line.strip() and _is_json(line.encode()):
            records.append(json.loads(line))
    return records


def _is_json(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _free_name(folder: Path) -> Path:
    number = 1
    while (folder / f"metrics.{number}.jsonl").exists():
        number += 1
    return folder / f"metrics.{number}.jsonl"
