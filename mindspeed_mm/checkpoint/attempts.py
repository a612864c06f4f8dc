"""Attempts of one launch: after a failure its launcher starts all processes again, and the run goes on by itself.

The record of the launch in the run folder tells which launch its files belong to. An attempt that finds its own launch
there goes on from the last checkpoint in the folder, whatever --load names.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mindspeed_mm.checkpoint.launch_record import this_launch_id
from mindspeed_mm.checkpoint.run_folder import checkpoints, has_checkpoint, read_record
from mindspeed_mm.configs.run import Run
from mindspeed_mm.utils.log import info_rank0


def is_own(save: str | Path, restarts: int) -> bool:
    """Whether an earlier attempt of this launch wrote the files of a run folder.

    Args:
        save: the folder.
        restarts: how often the launcher has restarted the processes.
    """
    if not restarts:
        return False
    found, own = read_record(save).get("launch", {}), this_launch_id()
    if found.get("run_id") != own["run_id"]:
        return False
    # rank 0 may be on another machine than before, whose launcher is another process
    return found.get("machine") != own["machine"] or found.get("launcher") == own["launcher"]


def continued(run: Run) -> Run:
    """Return a run as an attempt trains it: after a restart it goes on from its own last checkpoint."""
    checkpoint, restarts = run.checkpoint, run.launch.restarts
    save = checkpoint.save
    if save is None or not is_own(save, restarts) or not (has_checkpoint(Path(save)) or checkpoints(Path(save))):
        return run
    info_rank0(f"restart {restarts} of this launch: it goes on from the last checkpoint in '{save}'")
    own = replace(
        checkpoint,
        load=save,
        ckpt_step=None,
        finetune=False,
        overwrite=False,
        no_load_optim=checkpoint.no_save_optim,
        no_load_rng=checkpoint.no_save_rng,
    )
    return replace(run, checkpoint=own, lora=None if run.lora is None else replace(run.lora, start=None))
