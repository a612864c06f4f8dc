"""How the launches of a run have ended: a line of a file in the run folder for each end that a rank has seen."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path

from mindspeed_mm.checkpoint.run_folder import ENDINGS
from mindspeed_mm.configs.run import Run
from mindspeed_mm.monitor.metrics import LineWriter
from mindspeed_mm.utils.errors import MMError
from mindspeed_mm.utils.first_failure import first_report
from mindspeed_mm.utils.lost_rank import lost_connection
from mindspeed_mm.utils.text import shorten

_LONGEST = 2000


def ending_record(run: Run, iteration: Callable[[], int]) -> EndingRecord:
    """Return the context in which a run trains; with --no-report it writes nothing.

    Args:
        iteration: returns the last step.
    """
    return EndingRecord(run.checkpoint.save if run.logging.report else None, run.launch.rank, iteration)


class EndingRecord:
    """A context of training, whose end it writes: rank 0 writes that a run is over or stopped, any rank its failure.

    Of ranks that fail because another one has, those of its machine write nothing.

    Attributes:
        why: what stops the run before its last step; None: nothing does.
    """

    def __init__(self, save: str | None, rank: int, iteration: Callable[[], int]) -> None:
        """
        Args:
            save: the run folder; None: nothing is written.
            rank: this process's.
            iteration: returns the last step.
        """
        self.why: str | None = None
        self._save, self._rank, self._iteration = save, rank, iteration

    def __enter__(self) -> EndingRecord:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            if first_report() is None:
                self._write("failed", _sentence(error))
        elif self._rank == 0:
            self._write("finished" if self.why is None else "stopped", self.why)

    def _write(self, state: str, why: str | None) -> None:
        if self._save is None:
            return
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        line = {"state": state, "iteration": self._iteration(), "time": now, "rank": self._rank, "why": why}
        try:
            writer = LineWriter(Path(self._save) / ENDINGS)
        except OSError:  # the folder is gone or full: what ends the run matters more
            return
        writer.write(line)
        writer.close()


def _sentence(error: BaseException) -> str:
    if isinstance(error, MMError):
        return shorten(str(error), _LONGEST)
    lost = lost_connection(error) if isinstance(error, Exception) else None
    return lost or shorten(f"{type(error).__name__}: {error}".rstrip(": "), _LONGEST)
