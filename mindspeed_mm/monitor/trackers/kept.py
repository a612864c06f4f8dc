"""The file in which a run folder keeps what it must know of a tracker, to continue its run there."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

from mindspeed_mm.monitor.trackers.base import Kept

_FOLDER = "trackers"


class KeptFile:
    """`<save>/trackers/<name>.json`; without a run folder nothing is kept."""

    def __init__(self, folder: Path | None, name: str) -> None:
        """
        Args:
            folder: run folder; None: there is none.
            name: of the tracker.
        """
        self._path = None if folder is None else folder / _FOLDER / f"{name}.json"

    def read(self) -> Kept | None:
        """Return what an earlier start has kept; None: nothing that can be read."""
        try:
            return None if self._path is None else Kept(**json.loads(self._path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, kept: Kept) -> None:
        """Replace the file; a kill leaves the earlier one or this one.

        It isn't forced to disk, as it is written at each logged step: after a power cut some steps may come twice.
        """
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        working = self._path.with_suffix(".json.new")
        working.write_text(json.dumps(asdict(kept)) + "\n", encoding="utf-8")
        os.replace(working, self._path)
