"""What a run records for its report, on the rank that logs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from mindspeed_mm.checkpoint.run_folder import REPORT_FOLDER
from mindspeed_mm.configs.recipe import DrawnSample
from mindspeed_mm.configs.run import Run
from mindspeed_mm.data.loading.counting import BatchCounts
from mindspeed_mm.data.loading.loader import MMDataLoader
from mindspeed_mm.data.loading.providers import RunData
from mindspeed_mm.monitor.recording.drawn_sheets import DrawnSheets
from mindspeed_mm.monitor.recording.expert_shares import ExpertShares
from mindspeed_mm.monitor.recording.lengths import LengthCounts, known_lengths
from mindspeed_mm.monitor.recording.rank_counts import RankFigures
from mindspeed_mm.monitor.recording.rendered_rows import renderer_of
from mindspeed_mm.monitor.recording.samples import SampleRecorder, can_record_samples
from mindspeed_mm.parallel.world import World


class Recording:
    """Takes what each step had, and writes the files of `<save>/report/`."""

    def __init__(
        self, folder: Path, iteration: int, processes: int, lengths: LengthCounts, samples: SampleRecorder | None = None
    ) -> None:
        """
        Args:
            folder: of the report.
            iteration: from which the run goes on; 0: a new run.
            processes: of the run.
            lengths: counts the lengths of rows.
            samples: renders rows; None: rows of these data aren't shown.
        """
        self._samples, self._lengths, self._is_closed = samples, lengths, False
        self._drawn = DrawnSheets(folder, iteration)
        self._ranks = RankFigures(folder, iteration, processes)
        self._experts = ExpertShares(folder, iteration)

    def count(self, counts: BatchCounts) -> None:
        """Take the counts of a step."""
        if self._samples is not None:
            self._samples.add(counts.row_ids)
        self._lengths.add(counts)
        self._ranks.add(counts.ranks)

    def step(self, iteration: int, expert_shares: Callable[[], dict[str, list[float]]]) -> None:
        """Write what is due after a logged step.

        Args:
            expert_shares: see `StepResult`; not called where its values wouldn't be written.
        """
        self._ranks.write(iteration)
        self._experts.write(iteration, expert_shares)
        self._lengths.write()

    def draw(self, iteration: int, samples: Sequence[DrawnSample]) -> None:
        """Keep the samples that the model has drawn after a step."""
        self._drawn.add(iteration, samples)

    def close(self) -> None:
        """Finish the files, whatever ends the run; a second time does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._lengths.write(is_last=True)
        if self._samples is not None:
            self._samples.close()


@contextmanager
def open_recording(run: Run, data: RunData, iteration: int, world: World) -> Iterator[Recording | None]:
    """Return a context with what records a run; None: this rank doesn't, or nobody asks for it (--save, --no-report).

    Args:
        data: the opened data.
        iteration: from which the run goes on.
        world: this process.
    """
    if not (world.is_logging_rank and run.checkpoint.save and run.logging.report):
        yield None
        return
    folder, loader = Path(run.checkpoint.save) / REPORT_FOLDER, data.loader
    renderer = capacity = known = None
    if isinstance(loader, MMDataLoader):
        per_epoch = loader.rows_per_epoch
        renderer = renderer_of(loader.dataset, loader.consumed_samples // per_epoch if per_epoch else 0)
        capacity, known = loader.capacity, known_lengths(loader.dataset)
    lengths = LengthCounts(folder, iteration, capacity=capacity, known=known)
    samples = SampleRecorder(renderer, folder) if renderer is not None and can_record_samples() else None
    with closing(Recording(folder, iteration, world.size, lengths, samples)) as recording:
        yield recording
