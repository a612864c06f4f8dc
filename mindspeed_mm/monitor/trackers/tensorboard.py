"""TensorBoard: scalars in files of events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch.utils.tensorboard import SummaryWriter

from mindspeed_mm.configs.flags.trackers import TrackerArguments
from mindspeed_mm.monitor.trackers.base import Kept, Picture, TrackedRun


class Tensorboard:
    """A folder of events."""

    is_durable = False
    gather_seconds = 0.0

    def __init__(self, kept: Kept, purge_step: int | None) -> None:
        """
        Args:
            kept: what the run folder keeps of it; its id is the folder.
            purge_step: the first step that comes anew: events of earlier files from there on are not shown.
        """
        self.kept = kept
        self._writer = SummaryWriter(kept.run_id, purge_step=purge_step)

    def log(self, records: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        """Write each figure as a scalar."""
        for step, figures in records:
            for name, value in figures.items():
                self._writer.add_scalar(name, value, step)

    def show(self, pictures: Mapping[str, Picture], step: int) -> None:
        """Write each picture, without its prompt, for which there is no place."""
        for name, picture in pictures.items():
            self._writer.add_image(name, np.asarray(picture.image), step, dataformats="HWC")

    def close(self, *, failed: bool) -> None:
        """Flush and close the file."""
        self._writer.close()


def open_tensorboard(run: TrackedRun, flags: TrackerArguments) -> Tensorboard:
    """Open a file in --tensorboard-dir, else in the run folder."""
    directory = flags.tensorboard_dir or str((run.folder or Path()) / "tensorboard")
    kept = run.keep(directory, directory)
    if not run.iteration:
        return Tensorboard(kept, purge_step=None)
    if run.earlier is None:  # the folder may have more than this run folder's metrics.jsonl knows
        kept = replace(kept, step=run.iteration, evaluation=run.iteration)
    kept = kept.at_most(run.iteration)
    return Tensorboard(kept, purge_step=kept.step + 1)
