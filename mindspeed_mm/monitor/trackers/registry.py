"""The trackers by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial

from mindspeed_mm.configs.flags.trackers import TrackerArguments, TrackerName
from mindspeed_mm.monitor.trackers.base import TrackedRun, Tracker

#: name → the name that messages use
TITLES: Mapping[TrackerName, str] = {
    "tensorboard": "TensorBoard",
    "wandb": "W&B",
    "swanlab": "SwanLab",
    "mlflow": "MLflow",
    "trackio": "Trackio",
}


def load_tracker(name: TrackerName, flags: TrackerArguments) -> Callable[[TrackedRun], Tracker]:
    """Import a tracker's module, and its package with it; return what begins, or continues, a run there.

    Args:
        name: of the tracker, whose module has a function `open_<name>(run, flags)`.
        flags: those about trackers.
    """
    module = importlib.import_module(f"mindspeed_mm.monitor.trackers.{name}")
    return partial(vars(module)[f"open_{name}"], flags=flags)
