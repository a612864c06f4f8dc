"""Flags about experiment trackers: which of them get a run's figures, and under which name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from mindspeed_mm.configs.flags.spec import flag, no_effect

#: names of --report-to; each is an extra too
TrackerName = Literal["tensorboard", "wandb", "swanlab", "mlflow", "trackio"]
TRACKERS: tuple[TrackerName, ...] = ("tensorboard", "wandb", "swanlab", "mlflow", "trackio")


@dataclass(frozen=True)
class TrackerArguments:
    """Trackers."""

    report_to: Annotated[
        list[Literal["tensorboard", "wandb", "swanlab", "mlflow", "trackio", "none"]],
        flag("ours: trackers that get the figures of metrics.jsonl, by name; none = not even those of other flags"),
    ] = field(default_factory=list)
    run_project: Annotated[
        str | None,
        flag("ours: project that holds the run in all trackers; absent = the tracker's variable, else mindspeed_mm"),
    ] = None
    run_name: Annotated[
        str | None,
        flag("ours: name of the run in all trackers; absent = the tracker's variable, else that of the save folder"),
    ] = None
    run_tags: Annotated[list[str], flag("ours: tags of the run in trackers, beside that of the backend")] = field(
        default_factory=list
    )
    tensorboard_dir: Annotated[
        str | None,
        flag("folder of tensorboard events; absent, with report-to tensorboard = <save>/tensorboard", path="output"),
    ] = None
    wandb_project: Annotated[str | None, flag("project in W&B; implies report-to wandb")] = None
    wandb_exp_name: Annotated[str | None, flag("name of the run in W&B; absent = run-name")] = None
    wandb_save_dir: Annotated[
        str | None, flag("folder of W&B's files; absent = the variable WANDB_DIR, else the save folder", path="output")
    ] = None
    wandb_entity: Annotated[str | None, flag("user or team that owns the project in W&B")] = None
    tensorboard_log_interval: Annotated[
        int, no_effect("tensorboard gets what each log line says")("steps between two events")
    ] = 1
    tensorboard_queue_size: Annotated[int, no_effect("tensorboard's own default is used")("events kept in memory")] = (
        1000
    )
