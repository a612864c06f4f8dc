"""A process beside a run that renews its report, and takes a hundredth of a core at most for it."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from pathlib import Path

from mindspeed_mm.checkpoint.lock_holder import LOCK
from mindspeed_mm.checkpoint.run_folder import ENDINGS, LAUNCH, METRICS, REPORT_PAGE
from mindspeed_mm.monitor.report.image import draw_loss
from mindspeed_mm.monitor.report.metrics_file import MetricsFile
from mindspeed_mm.monitor.report.page import page_of
from mindspeed_mm.monitor.report.run_record import read_run
from mindspeed_mm.utils.files import replace_file

_SHARE = 0.01
_LAST_SECONDS = 60
#: the other ranks notice it by a collective that ends, or after its timeout
_SETTLE_SECONDS = 1800.0


class ReportFollower:
    """Renews report.html and loss.png of a run folder while a run trains there.

    Its own CPU time rules when: a renewal begins no earlier than a hundred times what everything before it has taken,
    and `least_seconds` after the last one. What is new in metrics.jsonl is read, the rest is remembered.
    """

    def __init__(
        self, folder: Path, *, first_seconds: float = 5.0, least_seconds: float = 30.0, look_seconds: float = 1.0
    ) -> None:
        """
        Args:
            folder: the run folder.
            first_seconds: no renewal begins before.
            least_seconds: between two renewals.
            look_seconds: between two looks at whether there is something new.
        """
        self._folder = folder
        self._first, self._least, self._look = first_seconds, least_seconds, look_seconds
        self._metrics = MetricsFile(folder)
        self._started = self._last = time.monotonic()
        self._seen: list[tuple[int, int] | None] = []
        self._failure = ""
        self.renewals = 0

    def run(self, end: int) -> None:
        """Renew the report until the run ends, and once then.

        Args:
            end: a file descriptor that the run writes to, or closes, when it ends; its process may be killed, too.
        """
        parent = os.getppid()
        while not (has_ended := bool(select.select([end], [], [], self._look)[0])) and os.getppid() == parent:
            if time.monotonic() >= self._due and self._has_news():
                self.renew()
        if has_ended or self._settles():
            signal.alarm(_LAST_SECONDS)  # a file system that hangs keeps no process
            self.renew()

    def _settles(self) -> bool:
        """Wait until the other ranks of a run have ended, too, after this one was killed.

        Returns:
            whether the folder still belongs to that run: a restart has a report process of its own.
        """
        lock = self._folder / LOCK
        holder, deadline = _text(lock), time.monotonic() + _SETTLE_SECONDS
        while read_run(self._folder, self._metrics).state.name == "running" and time.monotonic() < deadline:
            time.sleep(self._look)
            if _text(lock) not in (holder, ""):
                return False
        return True

    @property
    def _due(self) -> float:
        if not self.renewals:
            return self._started + self._first
        return max(self._last + self._least, self._started + time.process_time() / _SHARE)

    def _has_news(self) -> bool:
        """Whether a file has changed since the last time, and a step has been logged."""
        now = [_signature(self._folder / name) for name in (METRICS, LAUNCH, ENDINGS)]
        if now[0] is None or now == self._seen:
            return False
        self._seen = now
        return True

    def renew(self) -> None:
        """Write the page and the picture anew; that it can't is said once, and ends nothing."""
        try:
            run = read_run(self._folder, self._metrics)
            replace_file(self._folder / REPORT_PAGE, page_of([run]))
            draw_loss(run)
        except Exception as error:  # the training goes on, whatever is wrong with its report
            failure = f"{type(error).__name__}: {error}"
            if failure != self._failure:
                print(f"the report in '{self._folder}' can't be renewed ({failure})", file=sys.stderr, flush=True)
            self._failure = failure
        self._last = time.monotonic()
        self.renewals += 1


def _signature(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
