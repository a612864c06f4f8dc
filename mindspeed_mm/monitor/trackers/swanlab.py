"""SwanLab."""

from __future__ import annotations

import os

import swanlab

from mindspeed_mm.configs.flags.trackers import TrackerArguments
from mindspeed_mm.monitor.trackers.base import LoggedByStep, TrackedRun


class Swanlab(LoggedByStep):
    """An experiment of SwanLab: online it leaves out steps that it has, offline it keeps some in memory."""

    def close(self, *, failed: bool) -> None:
        """Finish the experiment; what it lacks online is in its folder, for `swanlab sync`."""
        if failed:
            self._run.finish(state="crashed", error="the run has ended with an error")
        else:
            self._run.finish()


def open_swanlab(run: TrackedRun, flags: TrackerArguments) -> Swanlab:
    """Begin or continue an experiment, in the mode that SWANLAB_MODE says: online, offline, local, disabled."""
    variables = ("SWANLAB_LOG_DIR", "SWANLAB_LOGDIR")
    has_folder = run.folder is not None and not any(map(os.environ.get, variables))
    resumed = {} if run.run_id is None else {"id": run.run_id, "resume": "allow"}
    made = swanlab.init(
        project=run.project_or("SWANLAB_PROJ_NAME"),
        name=run.name_or("SWANLAB_EXP_NAME"),
        log_dir=str(run.folder / "swanlog") if has_folder and run.folder is not None else None,
        tags=[*run.tags],
        config=dict(run.config),
        # nobody is asked for a login, and what is written to the terminal is the console's
        settings=swanlab.Settings.model_validate({"interactive": False, "terminal": {"proxy_type": "none"}}),
        **resumed,
    )
    place = made.url if made.mode == "online" else made.dir
    return Swanlab(made, run.keep(str(made.id), str(place)), swanlab.Image)
