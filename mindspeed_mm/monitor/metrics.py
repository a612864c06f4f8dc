"""metrics.jsonl, with one JSON object per logged step, and its writer, for other files of lines too."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from mindspeed_mm.checkpoint.run_folder import ANSWERS, METRICS
from mindspeed_mm.monitor.records import EvaluationRecord, StepRecord
from mindspeed_mm.utils.log import logger


class LineWriter:
    """Appends JSON objects to a file, one a line; each is in the file when `write` returns."""

    def __init__(self, path: Path) -> None:
        """Open the file, and create the folders above it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        # open during the whole run; the buffer keeps lines that a full disk doesn't take at once
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
            self._log_error(error)

    def close(self) -> None:
        """Force the file to disk and close it."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        except OSError as error:
            self._log_error(error)

    def _log_error(self, error: OSError) -> None:
        if not self._is_behind:
            logger.error(
                f"'{self._file.name}' can't be written ({error}); training goes on, and its lines follow later"
            )
        self._is_behind = True


class MetricsWriter(LineWriter):
    """Appends lines to `<save>/metrics.jsonl`, or another file of a run folder."""

    def __init__(self, folder: str | Path, *, resumed: bool, name: str = METRICS) -> None:
        """Open the file, repairing a last line that a kill tore.

        Args:
            resumed: whether this run continues the folder's run. Otherwise the file of a run that ended before its
                first checkpoint is kept under another name (metrics.1.jsonl, metrics.2.jsonl …) and a new one begun.
            name: of the file.
        """
        path = Path(folder) / name
        if path.exists():
            if resumed:
                repair_last_line(path)
            else:
                set_aside(path)
        super().__init__(path)


class MetricsSink:
    """Writes a run's records to metrics.jsonl, and the answers of its evaluations to a file beside it."""

    def __init__(self, save: str, *, resumed: bool) -> None:
        """
        Args:
            save: run folder.
            resumed: whether the folder's run is continued.
        """
        self._save, self._resumed = save, resumed
        self._metrics = MetricsWriter(save, resumed=resumed)
        self._answers: MetricsWriter | None = None

    def step(self, record: StepRecord) -> None:
        """Write a step; its line is in the file when this returns."""
        self._metrics.write(record.line)

    def evaluation(self, record: EvaluationRecord) -> None:
        """Write an evaluation, and each answer that it shows."""
        samples = () if record.generated is None else record.generated.samples
        if samples and self._answers is None:
            self._answers = MetricsWriter(self._save, resumed=self._resumed, name=ANSWERS)
        if self._answers is not None:
            for sample in samples:
                self._answers.write({"iteration": record.iteration, **sample})
        self._metrics.write(record.line)

    def close(self) -> None:
        """Force the files to disk and close them."""
        self._metrics.close()
        if self._answers is not None:
            self._answers.close()


def repair_last_line(path: Path) -> None:
    """Cut off a last line that isn't a whole JSON object, so that readers never see it."""
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
    """Return all whole records of a metrics.jsonl; an incomplete last line (of a running run) is left out."""
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


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def set_aside(path: Path) -> None:
    """Rename a file of an earlier run: name.jsonl to name.1.jsonl, or name.2.jsonl …, the first that is free."""
    number = 1
    while (kept := path.with_suffix(f".{number}{path.suffix}")).exists():
        number += 1
    os.replace(path, kept)
    logger.warning(f"'{path}' is of a run that left no checkpoint; it is kept as {kept.name}")
