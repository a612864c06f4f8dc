"""Weights & Biases."""

from __future__ import annotations

import os
from typing import Any

import wandb

from mindspeed_mm.configs.flags.trackers import TrackerArguments
from mindspeed_mm.monitor.trackers.base import LoggedByStep, TrackedRun

#: for W&B's answer at the start, and for the upload that is left at the end; the folder has all, for `wandb sync`
_SECONDS = 60.0


class Wandb(LoggedByStep):
    """A run of W&B: online it leaves out steps that it has, offline its process keeps some in memory."""

    def close(self, *, failed: bool) -> None:
        """Finish the run, and end W&B's process, unless a script has a run of its own there."""
        self._run.finish(exit_code=1 if failed else 0)
        if wandb.run is None:
            wandb.teardown()


def open_wandb(run: TrackedRun, flags: TrackerArguments) -> Wandb:
    """Begin or continue a run, in the mode that WANDB_MODE says: online, offline, disabled."""
    given = dict(os.environ)
    folder = flags.wandb_save_dir or (None if given.get("WANDB_DIR") or run.folder is None else str(run.folder))
    settings: dict[str, Any] = {"silent": True, "init_timeout": _SECONDS, "finish_timeout": _SECONDS}
    if "WANDB_CONSOLE" not in given:  # it would record the line that is renewed on a terminal
        settings["console"] = "off"
    if folder is not None:
        os.makedirs(folder, exist_ok=True)
    made = wandb.init(
        project=flags.wandb_project or run.project_or("WANDB_PROJECT"),
        name=flags.wandb_exp_name or run.name_or("WANDB_NAME"),
        entity=flags.wandb_entity,
        id=run.run_id,
        resume=None if run.run_id is None else "allow",
        dir=folder,
        tags=[*run.tags],
        config=dict(run.config),
        settings=wandb.Settings(**settings),
    )
    return Wandb(made, run.keep(str(made.id), str(made.settings.sync_dir if made.offline else made.url)), wandb.Image)
