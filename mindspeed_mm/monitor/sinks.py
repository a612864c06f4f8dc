"""The files that a run's records go to, and on which ranks."""

from __future__ import annotations

from mindspeed_mm.configs.run import Run
from mindspeed_mm.monitor.metrics import MetricsSink
from mindspeed_mm.monitor.records import Sink
from mindspeed_mm.monitor.report.sink import ReportSink
from mindspeed_mm.monitor.tensorboard import TensorboardSink


def open_sinks(run: Run, *, resumed: bool, is_logging_rank: bool) -> list[Sink]:
    """Return what writes a run's records on this rank.

    Args:
        resumed: whether the run in the --save folder is continued.
        is_logging_rank: whether this rank writes the files.
    """
    if not is_logging_rank:
        return []
    sinks: list[Sink] = []
    if run.checkpoint.save:
        sinks.append(MetricsSink(run.checkpoint.save, resumed=resumed))
    if run.logging.tensorboard_dir:
        sinks.append(TensorboardSink(run.logging.tensorboard_dir))
    if run.checkpoint.save and run.logging.report:
        sinks.append(ReportSink(run.checkpoint.save))  # closed last: it shows what the others have written
    return sinks
