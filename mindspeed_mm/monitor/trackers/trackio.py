"""Trackio."""

from __future__ import annotations

import datetime
import os
from dataclasses import replace

import trackio
from trackio.sqlite_storage import SQLiteStorage

from mindspeed_mm.configs.flags.trackers import TrackerArguments
from mindspeed_mm.monitor.trackers.base import DEFAULT_PROJECT, LoggedByStep, TrackedRun


class Trackio(LoggedByStep):
    """A run of a Trackio project, which finds runs by their names; a thread of it writes twice a second."""

    def close(self, *, failed: bool) -> None:
        """Write what is left."""
        self._run.finish()


def open_trackio(run: TrackedRun, flags: TrackerArguments) -> Trackio:
    """Begin or continue a run in the folder of TRACKIO_DIR, or on what TRACKIO_SPACE_ID or TRACKIO_SERVER_URL name."""
    project = run.project or os.environ.get("TRACKIO_PROJECT") or DEFAULT_PROJECT
    server = os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL")
    known = {} if server else _last_steps(project)
    name = run.run_id or run.name or run.default_name
    if run.run_id is None and name in known:
        name = f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    config = {"tags": [*run.tags], **run.config}
    made = trackio.init(
        project, name=name, config=config, resume="never" if run.run_id is None else "allow", embed=False
    )
    kept = run.keep(made.name, server or str(trackio.utils.TRACKIO_DIR))
    if run.run_id is not None and name in known:
        kept = replace(kept, step=known[name], evaluation=known[name], samples=known[name])
    return Trackio(made, kept, trackio.Image)


def _last_steps(project: str) -> dict[str, int]:
    """Name → last step of each run of a project in the local store."""
    if not SQLiteStorage.get_project_db_path(project).exists():
        return {}
    names = {str(record["name"]) for record in SQLiteStorage.get_run_records(project)}
    return {name: SQLiteStorage.get_max_step_for_run(project, name) or 0 for name in names}
