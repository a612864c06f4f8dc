"""lengths.json: how long rows are, and how much of the batches is padding."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm.data.loading.counting import BatchCounts
from mindspeed_mm.data.loading.dataset import RecordDataset
from mindspeed_mm.utils.files import read_object, replace_file
from mindspeed_mm.utils.log import logger

_FILE = "lengths.json"
_SECONDS = 20.0  # between two writes
#: four bins an octave, of whole tokens, up to 2^24
_EDGES = np.unique(np.round(2.0 ** (np.arange(4 * 24 + 1) / 4)).astype(np.int64))


def known_lengths(dataset: object) -> np.ndarray | None:
    """Return the tokens of each row, [rows], where they were computed before the run (a token cache); None: unknown."""
    if not isinstance(dataset, RecordDataset) or dataset.cache is None or dataset.indices is None:
        return None
    tokens = dataset.cache.tokens()[dataset.indices]
    return tokens[tokens > 0]


class LengthCounts:
    """Counts rows by their length: those of all data if they are known, else those that this rank has read.

    Padding is of the batches of all ranks. A resumed run adds to what the file holds.
    """

    def __init__(self, folder: Path, iteration: int, *, capacity: int | None, known: np.ndarray | None = None) -> None:
        """
        Args:
            folder: of the report.
            iteration: from which the run goes on; 0: a new run.
            capacity: tokens of a pack; None: rows aren't packed.
            known: tokens of each row of the data, [rows]; None: they are counted while they are read.
        """
        self._path, self._capacity, self._is_known = folder / _FILE, capacity, known is not None
        self._counts = np.zeros(len(_EDGES), dtype=np.int64)
        self._rows = self._tokens = self._positions = self._longest = 0
        self._waiting: list[int] = []
        self._written = 0.0
        if iteration:
            self._restore(read_object(self._path))
        if known is not None:
            self._counts[:] = 0
            self._rows = self._longest = 0
            self._bin(known)

    def add(self, counts: BatchCounts) -> None:
        """Add the counts of a step: lengths of this rank's rows, tokens and positions of all ranks."""
        self._tokens += counts.tokens
        self._positions += counts.positions
        if not self._is_known:
            self._waiting += counts.lengths

    def write(self, *, is_last: bool = False) -> None:
        """Write the file, if the last time is long ago or `is_last`."""
        if not is_last and time.monotonic() - self._written < _SECONDS:
            return
        self._written = time.monotonic()
        self._bin(np.asarray(self._waiting, dtype=np.int64))
        self._waiting = []
        if not self._rows:
            return
        used = np.flatnonzero(self._counts)
        first, last = int(used[0]), int(used[-1])
        edges = [*_EDGES[first : last + 1].tolist(), int(_EDGES[min(last + 1, len(_EDGES) - 1)])]
        content = {
            "of": "data" if self._is_known else "read",
            "rows": self._rows,
            "longest": self._longest,
            "histogram": {"edges": edges, "counts": self._counts[first : last + 1].tolist()},
            "capacity": self._capacity,
            "tokens": self._tokens,
            "positions": self._positions,
            "padding": 1 - self._tokens / self._positions if self._positions else None,
        }
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._path, json.dumps(content) + "\n")
        except OSError as error:
            logger.error(f"'{self._path}' can't be written ({error}); training goes on")

    def _bin(self, lengths: np.ndarray) -> None:
        """Add rows to the bins: a bin holds lengths from its edge up to, but without, the next one."""
        if not len(lengths):
            return
        places = np.clip(np.searchsorted(_EDGES, lengths, side="right") - 1, 0, len(_EDGES) - 1)
        self._counts += np.bincount(places, minlength=len(_EDGES))
        self._rows += len(lengths)
        self._longest = max(self._longest, int(lengths.max()))

    def _restore(self, content: Mapping[str, Any]) -> None:
        """Continue the counts of an earlier launch, if the file is one of these."""
        try:
            edges, counts = content["histogram"]["edges"], content["histogram"]["counts"]
            places = np.searchsorted(_EDGES, edges[:-1])
            self._counts[places] = counts
            self._rows, self._longest = int(content["rows"]), int(content["longest"])
            self._tokens, self._positions = int(content["tokens"]), int(content["positions"])
        except (KeyError, TypeError, ValueError, IndexError):
            self._counts[:] = 0
            self._rows = self._longest = self._tokens = self._positions = 0
