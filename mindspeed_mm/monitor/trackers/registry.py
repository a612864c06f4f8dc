"""The trackers by name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from mindspeed_mm.configs.flags.trackers import TrackerArguments, TrackerName
from mindspeed_mm.monitor.trackers.base import TrackedRun, Tracker

#: name → the name that messages use
TITLES: Mapping[TrackerName, str] = {
    "tensorboard": "TensorBoard",
    "wandb": "W&B",
}


def open_tracker(name: TrackerName, run: TrackedRun, *, flags: TrackerArguments) -> Tracker:
    """Import a tracker's module and begin, or continue, a run there.

    Args:
        name: of the tracker, whose module has a function `open_<name>(run, flags)`.
        run: what it is told of the run.
        flags: those about trackers.
    """
    module = importlib.import_module(f"mindspeed_mm.monitor.trackers.{name}")
    tracker: Tracker = vars(module)[f"open_{name}"](run, flags)
    return tracker
