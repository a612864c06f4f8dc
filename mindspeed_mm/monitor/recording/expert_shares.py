"""experts.jsonl: the share of a layer's tokens that each expert got, at logged steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from mindspeed_mm.monitor.recording.series import Series

_LAYERS = 12  # that are kept, evenly chosen
_NUMBERS = 40_000  # of the file, about
_LIMIT = 200


class ExpertShares:
    """Writes the load of experts; a model with many has fewer lines."""

    def __init__(self, folder: Path, iteration: int) -> None:
        """
        Args:
            folder: of the report.
            iteration: from which the run goes on.
        """
        self._series = Series(folder / "experts.jsonl", iteration=iteration, limit=_LIMIT)

    def write(self, iteration: int, shares: Callable[[], dict[str, list[float]]]) -> None:
        """Write the load of a step.

        Args:
            shares: () → layer → share of each expert; it waits for the device, and isn't called where nothing is due.
        """
        if not self._series.is_due(iteration) or not (found := shares()):
            return
        layers = list(found)
        chosen = np.unique(np.linspace(0, len(layers) - 1, min(len(layers), _LAYERS)).round().astype(int))
        kept = {layers[place]: [round(share, 5) for share in found[layers[place]]] for place in chosen}
        self._series.limit = max(10, min(_LIMIT, _NUMBERS // sum(map(len, kept.values()))))
        self._series.add(iteration, [{"layers": kept}])
