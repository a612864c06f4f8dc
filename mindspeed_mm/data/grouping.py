"""Samplers that bring rows of like cost together: the order is kept window by window, and changed within."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mindspeed_mm.data.balance import even_split
from mindspeed_mm.data.media import SampleSize

#: windows are this many global batches long, but hold no more rows than can be measured in seconds
_WINDOW_BATCHES, _WINDOW_ROWS = 50, 8192


@dataclass(frozen=True)
class Grouping:
    """How the rows of a window are put into global batches.

    Attributes:
        kind: "alike": a global batch holds rows of like size; "even": all hold as much.
        by: what a size is: "tokens" or "patches" (of images and videos).
    """

    kind: Literal["alike", "even"]
    by: Literal["tokens", "patches"]

    def window(self, global_batch_size: int) -> int:
        """Global batches of a window."""
        return max(2, min(_WINDOW_BATCHES, _WINDOW_ROWS // global_batch_size))

    def regroup(
        self, sizes: Sequence[Sequence[SampleSize]], global_batch_size: int, key: Sequence[int]
    ) -> list[list[int]]:
        """Return the global batches of a window, as places in it.

        Args:
            sizes: Of each row of the window, one entry a piece.
            global_batch_size: Rows of a global batch; a rest stays the last one.
            key: Decides the order of the batches, with `kind` alike: the same key, the same order.
        """
        costs = [sum(getattr(size, self.by) for size in pieces) for pieces in sizes]
        whole = len(costs) // global_batch_size
        if self.kind == "even":
            used = whole * global_batch_size
            groups = [sorted(part) for part in even_split(costs[:used], whole)] if whole else []
        else:
            ranked = sorted(range(len(costs)), key=lambda place: (-costs[place], place))
            used = len(costs)
            # the rest is taken from the middle of the ranking: it is no more special than other rows
            middle = (used - whole * global_batch_size, whole // 2 * global_batch_size)
            rest = ranked[middle[1] : middle[1] + middle[0]]
            ranked = ranked[: middle[1]] + ranked[middle[1] + middle[0] :]
            groups = [ranked[i : i + global_batch_size] for i in range(0, len(ranked), global_batch_size)]
            raw = np.random.PCG64(np.random.SeedSequence(tuple(key))).random_raw(max(1, whole))[:whole]
            groups = [groups[place] for place in np.argsort(raw, kind="stable").tolist()]
            return [*groups, rest] if rest else groups
        return [*groups, list(range(used, len(costs)))] if used < len(costs) else groups
