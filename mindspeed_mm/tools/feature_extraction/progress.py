"""Progress of the extraction: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import time

from mindspeed_mm.utils.log import logger

_SECONDS = 30.0


class ExtractionProgress:
    """Counts rows.

    Args:
        what: name of the results.
        total: number of rows.
        shown: False: nothing is shown (on ranks other than the first).
    """

    def __init__(self, what: str, total: int, *, shown: bool) -> None:
        from rich.console import Console
        from rich.progress import MofNCompleteColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        console = Console(stderr=True)
        self._what, self._total, self._shown = what, total, shown
        self._done, self._started = 0, time.perf_counter()
        self._logged = self._started
        self._on_terminal = console.is_terminal
        columns = (*Bar.get_default_columns()[:-1], MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Bar(*columns, console=console)
        self._task = self._bar.add_task(what, total=total)

    def __enter__(self) -> ExtractionProgress:
        if self._shown and self._on_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self) -> None:
        """Count one row."""
        self._done += 1
        self._bar.advance(self._task)
        now = time.perf_counter()
        if self._shown and not self._on_terminal and now - self._logged > _SECONDS:
            self._logged = now
            rate = self._done / (now - self._started)
            left = (self._total - self._done) / rate / 60
            logger.info(f"{self._what}: {self._done} of {self._total} rows, {rate:.2f} rows/s, {left:.0f} minutes left")
