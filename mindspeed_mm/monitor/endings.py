"""Messages about a run that ends before its last step, or has none left: the reason, and how to continue."""

from __future__ import annotations

from mindspeed_mm.configs.eval_metrics import EVAL_METRICS
from mindspeed_mm.configs.run import Run
from mindspeed_mm.monitor.improvement import Improvement
from mindspeed_mm.monitor.signals import StopSignal, name_of
from mindspeed_mm.utils.files import is_same_path


def nothing_is_left(
    run: Run, iteration: int, batches_per_epoch: float | None, improvement: Improvement | None = None
) -> str:
    """Return the message for a checkpoint that has all requested steps already.

    Args:
        run: the run, with its length in steps.
        iteration: iteration of the checkpoint.
        batches_per_epoch: global batches in one pass over the data; None where that isn't known.
        improvement: how the evaluations have gone, where that may be what ended the run.
    """
    if improvement is not None and iteration < run.train_iters:
        return (
            f"nothing is left to train: {stopped_early(improvement, iteration, run)}; raise --early-stop or leave it "
            "out to train on"
        )
    length = run.length
    if length.train_samples is not None:
        found = f"--train-samples {length.train_samples} ({run.train_iters} iterations)"
        wanted = f"--train-samples to {(iteration + 1) * run.batch.global_batch_size} or more"
    elif length.train_epochs is not None and batches_per_epoch:
        found = f"--train-epochs {length.train_epochs:g} ({run.train_iters} iterations)"
        wanted = f"--train-epochs above {iteration / batches_per_epoch:.4g}"
    else:
        found, wanted = f"--train-iters {run.train_iters}", f"--train-iters above {iteration}"
    return (
        f"nothing is left to train: the checkpoint of --load '{run.checkpoint.load}' has done {iteration} iterations, "
        f"and {found} counts them too; raise {wanted} to train on, or give --finetune and another --save to start "
        "again with its weights"
    )


def stopped_early(improvement: Improvement, iteration: int, run: Run) -> str:
    """Return the message for a run that --early-stop ends before --train-iters.

    Args:
        iteration: its last iteration.
    """
    title = EVAL_METRICS[improvement.metric].title
    if improvement.value is None:
        best = "which was never finite"
    else:
        best = f"whose best is {improvement.value:.6E} at iteration {improvement.iteration}"
    number = "the last evaluation has" if improvement.since == 1 else f"{improvement.since} evaluations in a row have"
    return (
        f"--early-stop {run.length.early_stop}: {number} not improved the {title}, {best}; training ends after "
        f"iteration {iteration} of {run.train_iters}"
    )


def why_stopped(stop: StopSignal, is_time_up: bool, run: Run) -> str:
    """Return the reason, as known to this rank, why the ranks agreed to end after a step."""
    if stop.received is not None:
        return name_of(stop.received)
    if is_time_up:
        return f"--exit-duration-in-mins {run.length.exit_duration_in_mins:g}"
    return "a rank was asked to stop, or could not write"


def ended_early(why: str, iteration: int, run: Run) -> str:
    """Return the last line of a run that ended before --train-iters; its checkpoint has been saved.

    Args:
        why: the reason.
        iteration: its last iteration.
    """
    save, load = run.checkpoint.save, run.checkpoint.load
    line = f"{why}: ended after iteration {iteration} of {run.train_iters}"
    if not save:
        return f"{line}; nothing was saved, as there is no --save"
    how = "" if load and is_same_path(load, save) else f" with --load '{save}'"
    return f"{line}; its checkpoint is in '{save}', and the same command{how} goes on from it"
