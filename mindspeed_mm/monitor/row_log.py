"""Write the rows of each step to <save>/rows/rank<k>.jsonl, so that a spike of the loss can be traced to its rows."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from mindspeed_mm.checkpoint.run_folder import ROWS
from mindspeed_mm.monitor.metrics import LineWriter, set_aside
from mindspeed_mm.utils.log import notice


class RowLog:
    """Appends `{"iteration": n, "rows": [...]}` to the file of one data-parallel rank, in every step.

    Rows are numbered as in the data set. Like metrics.jsonl, a step's line is in the file before the step's checkpoint
    becomes visible. A resumed run removes lines after its checkpoint; one that starts again, after an
    attempt without a checkpoint, keeps that one's files under other names (rank0.1.jsonl …).
    """

    def __init__(self, save: str | Path, rank: int, ranks: int, iteration: int) -> None:
        """
        Args:
            rank, ranks: data-parallel rank and size; rank 0 also handles files of ranks that no longer exist.
            iteration: iteration of the checkpoint that the run continues; 0: a new run.
        """
        folder = Path(save) / ROWS
        for path in _own_files(folder, rank, ranks):
            if iteration:
                keep_until(path, iteration)
            else:
                set_aside(path)
        self._writer = LineWriter(folder / f"rank{rank}.jsonl")

    def write(self, iteration: int, rows: list[int] | None) -> None:
        """Write the rows of a step.

        Args:
            rows: numbers of its rows on this rank, those of a packed row one after the other; None: unknown, as
                with a loader of the user's own.
        """
        if rows is None:
            notice("--log-row-ids: the training loader's batches have no 'row_ids'; which rows they hold is not known")
        self._writer.write({"iteration": iteration, "rows": rows or []})

    def close(self) -> None:
        """Force the file to disk and close it."""
        self._writer.close()


def keep_until(path: Path, iteration: int) -> None:
    """Cut off lines of later iterations, and an incomplete last one."""
    with open(path, "rb+") as file:
        kept = 0
        for line in file:
            try:
                is_kept = line.endswith(b"\n") and json.loads(line)["iteration"] <= iteration
            except (ValueError, TypeError, KeyError):
                is_kept = False
            if not is_kept:
                break
            kept += len(line)
        file.truncate(kept)
        file.flush()
        os.fsync(file.fileno())


def _own_files(folder: Path, rank: int, ranks: int) -> Iterator[Path]:
    for path in sorted(folder.glob("rank*.jsonl")):
        number = re.fullmatch(r"rank(\d+)\.jsonl", path.name)
        if number and (int(number[1]) == rank or (rank == 0 and int(number[1]) >= ranks)):
            yield path
