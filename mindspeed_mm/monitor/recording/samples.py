"""samples.jsonl: a few of the rows that a run trains on, rendered by a process of its own."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from mindspeed_mm.data.workers import forked, start_worker
from mindspeed_mm.monitor.recording.rendered_rows import RowRenderer
from mindspeed_mm.utils.errors import MMError
from mindspeed_mm.utils.files import replace_file
from mindspeed_mm.utils.log import logger

_FILE = "samples.jsonl"
_MEDIA = "media"
_SHOWN = 6  # rows in the file
_CANDIDATES = 64  # rows that they are chosen from
_STEPS = 5  # that are waited for, for as many candidates
_LAST_SECONDS = 10.0  # that the end of a short run waits for its samples


class SampleRecorder:
    """Lets a process render some of the rows of the first steps, once they have been trained.

    The process is forked when this is made, like a worker of the loader: it shares what has been loaded, and nothing
    of it is the training's. It gives way to all others, and ends with its work, or with the process that it belongs to.
    """

    def __init__(self, renderer: RowRenderer, folder: Path) -> None:
        """
        Args:
            renderer: of the training data.
            folder: of the report.
        """
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        self._sender: Connection | None = sender
        self._process = context.Process(target=_record, args=(receiver, renderer, folder), daemon=True)
        self._process.start()
        receiver.close()
        self._rows: dict[int, None] = {}
        self._steps = 0

    def add(self, rows: Sequence[int] | None) -> None:
        """Add the rows of a step; when there are enough, the process begins."""
        if self._sender is None:
            return
        self._steps += 1
        self._rows.update(dict.fromkeys(rows or ()))
        if len(self._rows) >= _CANDIDATES or self._steps >= _STEPS:
            self._begin()

    def close(self) -> None:
        """Wait for the process, of a run that was shorter than its work; without a step there is nothing to render."""
        if self._rows:
            self._begin()
            self._process.join(_LAST_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()

    def _begin(self) -> None:
        sender, self._sender = self._sender, None
        if sender is None:
            return
        try:
            sender.send(list(self._rows)[:_CANDIDATES])
        except OSError as error:  # the process is gone
            logger.error(f"the samples of the report can't be made: {error}")
        sender.close()


def can_record_samples() -> bool:
    """Whether processes can be forked here."""
    return bool(forked(1))


def _record(receiver: Connection, renderer: RowRenderer, folder: Path) -> None:
    """Work of the process."""
    start_worker(0)
    os.nice(19)
    logger.setLevel("ERROR")  # what there is to say of rows, the run's own workers say
    write_samples(receiver.recv(), renderer, folder)


def write_samples(rows: Sequence[int], renderer: RowRenderer, folder: Path) -> None:
    """Write samples.jsonl, and remove thumbnails of an earlier one.

    Args:
        rows: candidates.
    """
    lines: list[str] = []
    named: set[str] = set()
    for row in different_first(rows, renderer):
        try:
            sample = renderer.render(row, folder)
            if sample is not None:
                lines.append(json.dumps(sample, ensure_ascii=False) + "\n")
                named.update(name for medium in sample["media"] for name in medium["thumbnails"])
        except Exception as error:
            if not isinstance(error, MMError):
                logger.error(f"row {row} of the training data can't be shown: {type(error).__name__}: {error}")
        if len(lines) == _SHOWN:
            break
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / _FILE, "".join(lines))
        for path in (folder / _MEDIA).glob("*.jpg"):
            if f"{_MEDIA}/{path.name}" not in named:
                path.unlink(missing_ok=True)
    except OSError as error:
        logger.error(f"'{folder / _FILE}' can't be written ({error}); the report has no samples")


def different_first(rows: Sequence[int], renderer: RowRenderer) -> list[int]:
    """Return rows in an order in which each kind of row comes soon, and those with media before those without."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for row in rows:
        try:
            groups.setdefault(tuple(renderer.kinds(row)), []).append(row)
        except MMError:  # it gives no sample
            continue
    ordered = sorted(groups.values(), key=lambda group: not renderer.kinds(group[0]))
    longest = max(map(len, ordered), default=0)
    return [group[place] for place in range(longest) for group in ordered if place < len(group)]
