"""generated.jsonl and its pictures: what a model has made of the same prompts and the same noise over the run."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindspeed_mm.configs.recipe import DrawnSample
from mindspeed_mm.monitor.recording.series import Series, SeriesLine
from mindspeed_mm.utils.log import logger

GENERATED = "generated"
_SHEETS = 60  # iterations whose samples are kept


class DrawnSheets:
    """Writes the samples of an iteration, and removes those of earlier ones where there are many."""

    def __init__(self, folder: Path, iteration: int) -> None:
        """
        Args:
            folder: of the report.
            iteration: from which the run goes on; samples after it are removed.
        """
        self._folder = folder
        self._series = Series(
            folder / f"{GENERATED}.jsonl",
            iteration=iteration,
            limit=_SHEETS,
            keeps_last=True,
            on_drop=self._remove,
        )

    def add(self, iteration: int, samples: Sequence[DrawnSample]) -> None:
        """Write the samples of an iteration; a disk that is full ends nothing."""
        try:
            lines = [self._write(iteration, sample) for sample in samples]
        except OSError as error:
            logger.error(f"the samples of iteration {iteration} can't be written ({error}); the report lacks them")
            return
        self._series.add(iteration, lines)

    def _write(self, iteration: int, sample: DrawnSample) -> dict[str, Any]:
        (self._folder / GENERATED).mkdir(parents=True, exist_ok=True)
        paths = []
        for ending, content in sample.files.items():
            paths.append(f"{GENERATED}/step-{iteration:08d}-prompt-{sample.index}{ending}")
            (self._folder / paths[-1]).write_bytes(content)
        return {
            "prompt": sample.prompt,
            "index": sample.index,
            "seed": sample.seed,
            "size": list(sample.size),
            "files": [path for path in paths if path.endswith(".jpg")],
            "video": next((path for path in paths if path.endswith(".mp4")), None),
        }

    def _remove(self, line: SeriesLine) -> None:
        for name in (*line.get("files", ()), line.get("video")):
            if isinstance(name, str):
                with contextlib.suppress(OSError):
                    (self._folder / GENERATED / Path(name).name).unlink(missing_ok=True)
