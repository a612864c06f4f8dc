"""Flags about saving and loading."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from mindspeed_mm.configs.flags.spec import flag, no_effect


@dataclass
class CheckpointArguments:
    """Checkpoints."""

    save: Annotated[str | None, flag("run folder: checkpoints, metrics.jsonl", path="output")] = None
    load: Annotated[str | None, flag("run folder to go on from; empty = none", path="directory")] = None
    save_interval: Annotated[int | None, flag("steps between two checkpoints; absent = only at the end", minimum=1)] = (
        None
    )
    save_total_limit: Annotated[int | None, flag("ours: newest checkpoints that are kept; absent = all", minimum=1)] = (
        None
    )
    save_hf: Annotated[
        int | None, flag("ours: export a HF directory at the end, and every N steps if N is given", bare=0, minimum=0)
    ] = None
    ckpt_format: Annotated[Literal["torch_dcp", "torch_dist", "torch"], flag("torch_dcp; FSDP2 writes no other")] = (
        "torch_dcp"
    )
    ckpt_step: Annotated[int | None, flag("load this iteration instead of the newest", minimum=0)] = None
    finetune: Annotated[bool, flag("load weights only, and start at iteration 0")] = False
    no_save_optim: Annotated[bool, flag("leave the optimizer out of checkpoints")] = False
    no_save_rng: Annotated[bool, flag("leave random states out of checkpoints")] = False
    no_load_optim: Annotated[bool, flag("don't load the optimizer")] = False
    no_load_rng: Annotated[bool, flag("don't load random states")] = False
    no_strict_load: Annotated[
        bool, flag("ours: weights may be missing (they keep random values) or left over; both are listed")
    ] = False
    allow_unsafe_pickle: Annotated[
        bool, flag("ours: also unpickle .bin weights that hold more than tensors; this can run code that they bring")
    ] = False
    async_save: Annotated[
        bool, no_effect("a checkpoint is whole before the next step starts")("save in the background")
    ] = False
    use_persistent_ckpt_worker: Annotated[
        bool, no_effect("checkpoints are not saved in the background")("for async-save")
    ] = False
    use_dist_ckpt: Annotated[bool, no_effect("checkpoints are torch_dcp")("older name of ckpt-format torch_dist")] = (
        False
    )
