"""Notes about rows that were cut or left out: counted by reason, and logged now and then."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from mindspeed_mm.utils.launch import is_first_rank
from mindspeed_mm.utils.log import logger


class Note(NamedTuple):
    """A note about one row.

    Attributes:
        message: the row's name and its fault.
        fault: reason for leaving it out, to count by; None: it was only cut.
    """

    message: str
    fault: str | None = None


class NoteCounter:
    """Counts notes, and logs them at the first one and whenever their number has doubled."""

    def __init__(self) -> None:
        self._cut = 0
        self._faults: Counter[str] = Counter()

    @property
    def faults(self) -> Counter[str]:
        """Rows left out so far, by reason."""
        return self._faults

    def add(self, notes: list[Note]) -> None:
        """Count notes, and log their number if it is time."""
        cut = [note for note in notes if note.fault is None]
        if _is_time(self._cut, len(cut)):
            _warn(f"rows too long for the sequence length, on this rank so far: {self._cut + len(cut)} ({cut[-1][0]})")
        self._cut += len(cut)
        left_out = [note for note in notes if note.fault is not None]
        before = self._faults.total()
        self._faults.update(note.fault for note in left_out if note.fault is not None)
        if _is_time(before, len(left_out)):
            reasons = ", ".join(f"{count} × {reason}" for reason, count in self._faults.most_common())
            _warn(
                f"rows left out, on this rank so far: {self._faults.total()} ({reasons}; "
                f"the last: {left_out[-1].message})"
            )


def _is_time(before: int, more: int) -> bool:
    return more > 0 and (before == 0 or before.bit_length() != (before + more).bit_length())


def _warn(message: str) -> None:
    if is_first_rank():
        logger.warning(message)
