"""Start of the data of a run on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DataStart:
    """Rank and position of the loaders of a run.

    Attributes:
        rank, size: number of this process among those that read rows of their own, and how many they are.
        consumed_samples: rows that the run has trained on so far, over all ranks.
        state: position of the training loader (`RunData.state_dict`) in the checkpoint from which the run continues.
    """

    rank: int = 0
    size: int = 1
    consumed_samples: int = 0
    state: dict[str, Any] | None = None


_current = DataStart()


def current_start() -> DataStart:
    """Return where the data of the run in this process begin, for providers that are called without it."""
    return _current


def set_current_start(start: DataStart) -> None:
    """Make `start` what `current_start` returns."""
    global _current
    _current = start
