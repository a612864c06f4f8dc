"""Flags about batch sizes and about how long a run lasts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from mindspeed_mm.configs.flags.spec import flag, refused


@dataclass(frozen=True)
class BatchArguments:
    """Batch."""

    micro_batch_size: Annotated[int | None, flag("rows that one rank takes at once", minimum=1)] = None
    global_batch_size: Annotated[
        int | None, flag("rows in one optimizer step; absent = micro-batch-size × data-parallel ranks", minimum=1)
    ] = None
    gradient_accumulation_steps: Annotated[
        int | None,
        flag(
            "ours: micro-batches of a rank in one optimizer step, in place of global-batch-size, which is then "
            "micro-batch-size × this × data-parallel ranks",
            minimum=1,
        ),
    ] = None
    rampup_batch_size: Annotated[
        list[str] | None,
        refused("growing batches are not there yet; choose one --global-batch-size")("start size, increment, samples"),
    ] = None


@dataclass(frozen=True)
class TrainingArguments:
    """Length of a run (one of train-iters, train-epochs, train-samples)."""

    train_iters: Annotated[int | None, flag("optimizer steps in all, across resumes", minimum=1)] = None
    train_epochs: Annotated[float | None, flag("ours: passes over the data set, fractions allowed", above=0)] = None
    train_samples: Annotated[int | None, flag("rows in all", minimum=1)] = None
    exit_interval: Annotated[int | None, flag("exit after a step that is a multiple of this", minimum=1)] = None
    exit_duration_in_mins: Annotated[int | None, flag("save and exit after this many minutes", minimum=1)] = None
    early_stop: Annotated[
        int | None,
        flag(
            "ours: end the run after this many evaluations in a row without a better value of the figure of "
            "--save-best (absent = loss)",
            minimum=1,
        ),
    ] = None
    max_skipped_steps: Annotated[
        int,
        flag(
            "ours: skipped steps in a row (loss or gradient not finite, or no targets) that end the run; 0 = none",
            minimum=0,
        ),
    ] = 100
    dry_run: Annotated[
        bool, flag("ours: plan the run without devices and weights, print one JSON object about it and exit")
    ] = False
    dry_run_world_size: Annotated[
        int | None,
        flag("ours: with dry-run: processes to plan for; absent = WORLD_SIZE", spellings=("--world-size",), minimum=1),
    ] = None
    exit_signal_handler: Annotated[bool, flag("signals save a checkpoint and exit; always on")] = True
