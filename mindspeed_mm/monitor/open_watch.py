"""The watch of a run on this rank, with all that it hands records on to."""

from __future__ import annotations

from mindspeed_mm.configs.run import Run
from mindspeed_mm.monitor.console.choice import open_console
from mindspeed_mm.monitor.recording.recording import Recording
from mindspeed_mm.monitor.records import Sink
from mindspeed_mm.monitor.row_log import RowLog
from mindspeed_mm.monitor.sinks import open_sinks
from mindspeed_mm.monitor.watch import Watch
from mindspeed_mm.parallel.world import World


def open_watch(
    run: Run, world: World, compute_dtype: str, iteration: int, totals: Sink, recording: Recording | None
) -> Watch:
    """Open what a run logs on this rank.

    Args:
        world: this process.
        compute_dtype: bf16, fp16 or fp32.
        iteration: from which the run goes on; 0: a new run.
        totals: a further sink, on all ranks.
        recording: what this rank records for the report.
    """
    rows = None
    if run.logging.log_row_ids and run.checkpoint.save and world.counts_rows:
        rows = RowLog(run.checkpoint.save, world.batch.rank, world.batch.size, iteration)
    files = open_sinks(run, iteration=iteration, is_logging_rank=world.is_logging_rank)
    return Watch(
        sinks=[*files, totals],
        console=open_console(run, is_logging_rank=world.is_logging_rank),
        row_log=rows,
        recording=recording,
        log_interval=run.logging.log_interval,
        train_iters=run.train_iters,
        global_batch_size=run.batch.global_batch_size,
        world_size=run.launch.world_size,
        compute_dtype=compute_dtype,
    )
