"""TensorBoard: scalars in files of events."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mindspeed_mm.configs.flags.trackers import TrackerArguments
from mindspeed_mm.monitor.trackers.base import Kept, TrackedRun


class Tensorboard:
    """A folder of events."""

    is_durable = False

    def __init__(self, directory: str, purge_step: int | None) -> None:
        """
        Args:
            directory: the folder.
            purge_step: the first step that comes anew: events of earlier files from there on are not shown.
        """
        from torch.utils.tensorboard import SummaryWriter

        self.kept = Kept(directory, directory)
        self._writer = SummaryWriter(directory, purge_step=purge_step)

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Write each figure as a scalar."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self, *, failed: bool) -> None:
        """Flush and close the file."""
        self._writer.close()


def open_tensorboard(run: TrackedRun, flags: TrackerArguments) -> Tensorboard:
    """Open a file in --tensorboard-dir, else in the run folder."""
    directory = flags.tensorboard_dir or str((run.folder or Path()) / "tensorboard")
    return Tensorboard(directory, purge_step=run.iteration + 1 if run.iteration else None)
