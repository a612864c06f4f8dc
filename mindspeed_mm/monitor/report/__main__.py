"""`python -m mindspeed_mm.monitor.report FOLDER`: what `ReportSink` starts beside a run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from mindspeed_mm.monitor.report.follower import ReportFollower

if __name__ == "__main__":
    os.nice(5)  # with 19, the last renewal would take long where all cores are busy, and the run waits for it
    ReportFollower(Path(sys.argv[1])).run(sys.stdin.fileno())
