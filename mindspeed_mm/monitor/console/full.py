"""The log line, in its published form; new figures come after the published ones.

Scripts split it on ':' and take the elapsed time as the fifth field.
"""

from __future__ import annotations

import datetime

from mindspeed_mm.monitor.console.base import Console
from mindspeed_mm.monitor.records import EvaluationRecord, StepRecord


class FullConsole(Console):
    """Prints each record in its published form, and nothing else: scripts read what it prints."""

    def step(self, record: StepRecord) -> None:
        """Print the line of a step."""
        print(format_step(record), flush=True)

    def evaluation(self, record: EvaluationRecord) -> None:
        """Print the line of an evaluation."""
        print(format_evaluation(record), flush=True)


def format_step(record: StepRecord) -> str:
    """Return the log line of a training step."""
    now = datetime.datetime.now().strftime("%Y-%m-%d %H:%M:%S")
    # no other colon may come before the elapsed time, and one per field after it: scripts split on them
    fields = [
        f" [{now}] iteration {record.iteration:8d}/{record.train_iters:8d}",
        f"consumed samples: {record.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {record.step_ms:.1f}",
        f"learning rate: {record.learning_rate:.6E}",
        f"global batch size: {record.global_batch_size:5d}",
        f"loss: {record.loss:.6E}",
    ]
    fields += [f"{name}: {value:.6E}" for name, value in sorted(record.metrics.items())]
    if record.loss_scale != 1.0:
        fields.append(f"loss scale: {record.loss_scale:.1f}")
    fields += [
        f"grad norm: {record.grad_norm:.3f}",
        f"number of skipped iterations: {record.skipped_iterations:3d}",
        f"number of nan iterations: {record.nan_iterations:3d}",
    ]
    fields += _extra_figures(record)
    return " | ".join(fields) + " |"


def _extra_figures(record: StepRecord) -> list[str]:
    shown = []
    if record.tokens_per_second is not None:
        shown.append(f"tokens per second: {record.tokens_per_second:.0f}")
    if media := sum(record.media_per_second.values()):
        shown.append(f"media per second: {media:.1f}")
    if record.tflops_per_device is not None:
        shown.append(f"TFLOP/s per device: {record.tflops_per_device:.2f}")
    if record.mfu is not None:
        shown.append(f"MFU: {record.mfu:.1%}")
    if record.data_wait_ms is not None:
        shown.append(f"data wait (ms): {record.data_wait_ms:.1f}")
    if record.data_wait_fraction is not None:
        shown.append(f"data wait: {record.data_wait_fraction:.1%}")
    if record.padding_fraction is not None:
        shown.append(f"padding: {record.padding_fraction:.1%}")
    if record.imbalance is not None:
        shown.append(f"imbalance: {record.imbalance:.2f}")
    if record.rows_left_out:
        shown.append(f"rows left out: {record.rows_left_out}")
    if record.iterations_without_targets:
        shown.append(f"iterations without targets: {record.iterations_without_targets}")
    if record.memory_bytes is not None:
        shown.append(f"memory (MB): {record.memory_bytes / 2**20:.0f}")
    minutes, seconds = divmod(round(record.eta_seconds), 60)
    shown.append(f"ETA: {minutes // 60}h{minutes % 60:02d}m{seconds:02d}s")
    return shown


def format_evaluation(record: EvaluationRecord) -> str:
    """Return the log line of an evaluation."""
    now = datetime.datetime.now().strftime("%Y-%m-%d %H:%M:%S")
    head = f" [{now}] validation loss at iteration {record.iteration} | validation batches: {record.batches}"
    line = f"{head} | loss: {record.loss:.6E} |"
    generated = record.generated
    if generated is None:
        return line
    figures = [f"{name}: {value:.6E}" for name, value in generated.figures.items()]
    return " ".join([line, *(f"{part} |" for part in (*figures, f"rows answered: {generated.rows}"))])
