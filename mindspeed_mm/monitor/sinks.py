"""What a run's records go to beside the console, and on which ranks."""

from __future__ import annotations

from functools import partial

from mindspeed_mm.configs.run import Run
from mindspeed_mm.configs.tracker_rules import asked_trackers
from mindspeed_mm.monitor.metrics import MetricsSink
from mindspeed_mm.monitor.records import Sink
from mindspeed_mm.monitor.report.sink import ReportSink
from mindspeed_mm.monitor.trackers.described import tracked_run
from mindspeed_mm.monitor.trackers.registry import TITLES, load_tracker
from mindspeed_mm.monitor.trackers.sink import TrackerSink


def open_sinks(run: Run, *, iteration: int, is_logging_rank: bool) -> list[Sink]:
    """Return what takes a run's records on this rank.

    Args:
        iteration: step of the checkpoint that the run goes on from; 0: it is new.
        is_logging_rank: whether this rank writes the files.
    """
    if not is_logging_rank:
        return []
    sinks: list[Sink] = []
    if run.checkpoint.save:
        sinks.append(MetricsSink(run.checkpoint.save, resumed=iteration > 0))
    names = asked_trackers(run.trackers)
    tracked = tracked_run(run, iteration) if names else None
    for name in names:
        assert tracked is not None
        sinks.append(TrackerSink(name, TITLES[name], tracked, partial(load_tracker, name, run.trackers)))
    if run.checkpoint.save and run.logging.report:
        sinks.append(ReportSink(run.checkpoint.save))  # closed last: it shows what the others have written
    return sinks
