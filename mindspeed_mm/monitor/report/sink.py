"""The sink that lets a report be renewed while a run trains: a process of its own does it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import mindspeed_mm
from mindspeed_mm.checkpoint.run_folder import REPORT_PAGE
from mindspeed_mm.monitor.records import EvaluationRecord, StepRecord
from mindspeed_mm.utils.log import logger

_PROGRAM = "mindspeed_mm.monitor.report"
#: that the end of a run waits for the last renewal
_LAST_SECONDS = 20.0


class ReportSink:
    """Starts the process, and ends it. It reads metrics.jsonl, so records need not be handed on."""

    def __init__(self, save: str) -> None:
        """Start the process, in a session of its own, with a low priority; training never waits for it.

        Args:
            save: the run folder.
        """
        self._save = save
        package = str(Path(mindspeed_mm.__file__).parents[1])
        paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _PROGRAM, save],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                start_new_session=True,
            )
        except OSError as error:
            self._say_why(f"no process can be started: {error}")

    def step(self, record: StepRecord) -> None:
        """Nothing is to be done."""

    def evaluation(self, record: EvaluationRecord) -> None:
        """Nothing is to be done."""

    def close(self) -> None:
        """Let the report be renewed once more, and wait for it, but not for long."""
        process, self._process = self._process, None
        if process is None or process.stdin is None:
            return
        with contextlib.suppress(OSError), process.stdin as end:
            end.write(b"\n")  # closing alone says nothing: workers of the loader may have the pipe open
        try:
            status = process.wait(_LAST_SECONDS)
            if status:
                self._say_why(f"its process ended with status {status}")
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            self._say_why(f"the last renewal took over {_LAST_SECONDS:g} s")

    def _say_why(self, why: str) -> None:
        logger.warning(
            f"'{self._save}/{REPORT_PAGE}' is not up to date: {why}; mindspeed-mm report {self._save} makes it"
        )
