"""Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import wandb

from mindspeed_mm.configs.flags.trackers import TrackerArguments
from mindspeed_mm.monitor.trackers.base import Kept, Picture, TrackedRun

#: for W&B's answer at the start, and for the upload that is left at the end; the folder has all, for `wandb sync`
_SECONDS = 60.0


class Wandb:
    """A run of W&B; its steps are the run's."""

    is_durable = False  # online W&B itself leaves out steps that it has; offline its process keeps some in memory
    gather_seconds = 0.0

    def __init__(self, run: Any, kept: Kept) -> None:
        """
        Args:
            run: what `wandb.init` has returned.
            kept: what the run folder keeps of it.
        """
        self._run, self.kept = run, kept

    def log(self, records: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        """Add figures to their step; W&B writes it once a later one comes."""
        for step, figures in records:
            self._run.log(dict(figures), step=step)

    def show(self, pictures: Mapping[str, Picture], step: int) -> None:
        """Log pictures with their prompts."""
        made = {name: wandb.Image(picture.image, caption=picture.prompt) for name, picture in pictures.items()}
        self._run.log(made, step=step)

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
    return Wandb(made, run.keep(str(made.id), str(made.settings.sync_dir if made.offline else made.url)))
