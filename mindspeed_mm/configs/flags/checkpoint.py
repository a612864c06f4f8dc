"""Flags about saving and loading."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from mindspeed_mm.configs.eval_metrics import METRIC_SYNONYMS, MetricName
from mindspeed_mm.configs.flags.spec import flag, no_effect


@dataclass(frozen=True)
class CheckpointArguments:
    """Checkpoints."""

    save: Annotated[str | None, flag("run folder: checkpoints, metrics.jsonl; one run at a time", path="output")] = None
    load: Annotated[str | None, flag("run folder, checkpoint or HF directory; empty = none", path="directory")] = None
    overwrite: Annotated[
        bool, flag("ours: remove what an earlier run wrote to --save, and start anew; without it that is refused")
    ] = False
    save_interval: Annotated[int | None, flag("steps between two checkpoints; absent = only at the end", minimum=1)] = (
        None
    )
    save_epochs: Annotated[
        int | None, flag("ours: epochs of the training data between two checkpoints; absent = none", minimum=1)
    ] = None
    save_total_limit: Annotated[int | None, flag("ours: newest checkpoints that are kept; absent = all", minimum=1)] = (
        None
    )
    save_best: Annotated[
        MetricName | None,
        flag(
            "ours: after each evaluation with the best value of this figure so far, save a checkpoint that stays; "
            "best.json names it",
            synonyms=METRIC_SYNONYMS,
        ),
    ] = None
    save_hf: Annotated[
        int | None, flag("ours: export a HF directory at the end, and every N steps if N is given", bare=0, minimum=0)
    ] = None
    ckpt_format: Annotated[
        Literal["torch_dcp", "torch_dist", "torch"],
        flag("whatever it says, one layout is written, which both backends read: torch's distributed checkpoint"),
    ] = "torch_dcp"
    ckpt_step: Annotated[
        int | Literal["best"] | None,
        flag("load this iteration instead of the newest; best = the one of --save-best", minimum=0),
    ] = None
    finetune: Annotated[bool, flag("load weights only, and start at iteration 0")] = False
    no_save_optim: Annotated[bool, flag("leave the optimizer out of checkpoints")] = False
    no_save_rng: Annotated[bool, flag("leave random states out of checkpoints")] = False
    no_load_optim: Annotated[bool, flag("don't load the optimizer")] = False
    no_load_rng: Annotated[bool, flag("don't load random states")] = False
    no_verify_checkpoint: Annotated[
        bool, flag("ours: look at the sizes of a checkpoint's files only, not at their content, before loading it")
    ] = False
    no_strict_load: Annotated[
        bool, flag("ours: weights may be missing (they keep random values) or left over; both are listed")
    ] = False
    allow_unsafe_pickle: Annotated[
        bool, flag("ours: also unpickle .bin weights that hold more than tensors; this can run code that they bring")
    ] = False
    async_save: Annotated[
        bool, flag("write checkpoints in the background: training waits for a copy in host memory only")
    ] = False
    on_save_failure: Annotated[
        Literal["continue", "exit"],
        flag("ours: after a checkpoint that could not be written; one at the run's end is always an error"),
    ] = "continue"
    use_persistent_ckpt_worker: Annotated[
        bool, no_effect("a thread of each rank writes, and there is no worker process to keep")("for async-save")
    ] = False
    use_dist_ckpt: Annotated[
        bool, no_effect("checkpoints are torch's distributed ones")("older name of ckpt-format torch_dist")
    ] = False
