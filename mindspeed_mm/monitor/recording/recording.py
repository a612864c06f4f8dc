"""What a run records for its report, on the rank that logs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from mindspeed_mm.checkpoint.run_folder import REPORT_FOLDER
from mindspeed_mm.configs.run import Run
from mindspeed_mm.data.loading.counting import BatchCounts
from mindspeed_mm.data.loading.loader import MMDataLoader
from mindspeed_mm.data.loading.providers import RunData
from mindspeed_mm.monitor.recording.rendered_rows import renderer_of
from mindspeed_mm.monitor.recording.samples import SampleRecorder, can_record_samples


class Recording:
    """Takes what each step had, and writes the files of `<save>/report/`."""

    def __init__(self, samples: SampleRecorder | None) -> None:
        """
        Args:
            samples: renders rows; None: rows of these data aren't shown.
        """
        self._samples = samples

    def count(self, counts: BatchCounts) -> None:
        """Take the counts of a step."""
        if self._samples is not None:
            self._samples.add(counts.row_ids)

    def close(self) -> None:
        """Finish the files, whatever ends the run."""
        if self._samples is not None:
            self._samples.close()


@contextmanager
def open_recording(run: Run, data: RunData, *, is_logging_rank: bool) -> Iterator[Recording | None]:
    """Return a context with what records a run; None: this rank doesn't, or nobody asks for it (--save, --no-report).

    Args:
        data: the opened data.
    """
    if not (is_logging_rank and run.checkpoint.save and run.logging.report):
        yield None
        return
    folder, loader = Path(run.checkpoint.save) / REPORT_FOLDER, data.loader
    renderer = None
    if isinstance(loader, MMDataLoader):
        per_epoch = loader.rows_per_epoch
        renderer = renderer_of(loader.dataset, loader.consumed_samples // per_epoch if per_epoch else 0)
    samples = SampleRecorder(renderer, folder) if renderer is not None and can_record_samples() else None
    with closing(Recording(samples)) as recording:
        yield recording
