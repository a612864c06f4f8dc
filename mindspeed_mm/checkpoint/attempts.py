"""Attempts of one launch: after a failure its launcher starts all processes again, and the run goes on by itself.

The first attempt notes in the run folder which launch it belongs to. A later one that finds the note of its own launch
knows that the folder's files are its own, and goes on from the last checkpoint there, whatever --load names.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

from mindspeed_mm.checkpoint.run_folder import checkpoints, has_checkpoint
from mindspeed_mm.checkpoint.run_lock import Holder
from mindspeed_mm.configs.run import Run
from mindspeed_mm.utils.files import write_json
from mindspeed_mm.utils.log import info_rank0

#: the note, in the run folder
LAUNCH = "launch.json"


def note_launch(save: str | Path) -> None:
    """Write into a run folder which launch its files belong to; rank 0 only."""
    write_json(Path(save) / LAUNCH, _this_launch())


def is_own(save: str | Path, restarts: int) -> bool:
    """Whether an earlier attempt of this launch wrote the files of a run folder.

    Args:
        save: the folder.
        restarts: how often the launcher has restarted the processes.
    """
    if not restarts:
        return False
    try:
        found = json.loads((Path(save) / LAUNCH).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    own = _this_launch()
    if not isinstance(found, dict) or found.get("run_id") != own["run_id"]:
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


def _this_launch() -> dict[str, str]:
    process = Holder.this_process()
    return {
        "run_id": os.environ.get("TORCHELASTIC_RUN_ID", ""),
        "machine": process.machine,
        "launcher": process.launcher,
    }
