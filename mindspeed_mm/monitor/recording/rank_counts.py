"""ranks.jsonl: the cost and the tokens of each data-parallel rank, and the memory of each process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm.data.loading.counting import RankCounts
from mindspeed_mm.monitor.recording.series import Series

_LISTED = 64  # ranks of a line


class RankFigures:
    """Adds up what the steps' reductions tell of each rank, and writes means of a step."""

    _cost: np.ndarray  # of each data-parallel rank, [ranks], over the interval
    _tokens: np.ndarray

    def __init__(self, folder: Path, iteration: int, processes: int) -> None:
        """
        Args:
            folder: of the report.
            iteration: from which the run goes on.
            processes: of the run; a single one has nothing to compare, and nothing is written.
        """
        self._processes = processes
        self._series = Series(folder / "ranks.jsonl", iteration=iteration)
        self._memory: Sequence[int] = ()
        self._start()

    def add(self, counts: RankCounts | None) -> None:
        """Add a step."""
        if counts is None:
            return
        self._steps += 1
        self._cost = self._cost + np.asarray(counts.cost, dtype=np.float64)
        self._tokens = self._tokens + np.asarray(counts.tokens, dtype=np.float64)
        self._memory = counts.memory_bytes or self._memory

    def write(self, iteration: int) -> None:
        """Write the means of the steps since the last call."""
        if self._steps and self._processes > 1:
            ranks, places = _most_different(self._cost), _most_different(np.asarray(self._memory))
            line: dict[str, Any] = {
                "cost": [_short(self._cost[rank] / self._steps) for rank in ranks],
                "tokens": [_short(self._tokens[rank] / self._steps) for rank in ranks],
                "memory_bytes": [self._memory[place] for place in places],
            }
            line |= {"ranks": ranks} if len(ranks) < len(self._cost) else {}
            line |= {"memory_ranks": places} if len(places) < len(self._memory) else {}
            self._series.add(iteration, [line])
        self._start()

    def _start(self) -> None:
        self._steps, self._cost, self._tokens = 0, np.zeros(1), np.zeros(1)


def _most_different(values: np.ndarray) -> list[int]:
    """The places of all values; of many, those of the least and of the largest ones."""
    if len(values) <= _LISTED:
        return list(range(len(values)))
    order = np.argsort(values, kind="stable")
    return sorted(int(place) for place in (*order[: _LISTED // 2], *order[-_LISTED // 2 :]))


def _short(value: float) -> float:
    """A value with six digits."""
    return float(f"{value:.6g}")
