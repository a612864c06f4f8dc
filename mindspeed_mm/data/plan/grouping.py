"""Samplers that group rows of similar cost or shape: the order of windows is kept, rows change places within them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from mindspeed_mm.data.media.media import SampleSize
from mindspeed_mm.data.plan.balance import even_split

#: windows have this many global batches, but no more rows than can be measured in seconds
_WINDOW_BATCHES, _WINDOW_ROWS = 50, 8192


class Shapes(Protocol):
    """The buckets of a data set, by number."""

    def rank(self, bucket: int) -> tuple[float, ...]:
        """Return the sort key of a bucket: neighbours in that order are alike."""

    def common(self, buckets: Sequence[int]) -> int:
        """Return the bucket to which samples of all these can be cut."""


@dataclass(frozen=True)
class Grouping:
    """The rule that puts the rows of a window into global batches.

    Attributes:
        kind: "alike": a global batch has rows of similar size; "even": all global batches have equal sizes; "bucket":
            all rows of a global batch are of one bucket. Rows that don't fill one are put together, neighbours by
            `Shapes.rank`, and cut to a bucket that they have in common.
        by: the measure of size: "tokens" or "patches" (of images and videos).
        shapes: with `kind` bucket: the buckets.
    """

    kind: Literal["alike", "even", "bucket"]
    by: Literal["tokens", "patches"] = "tokens"
    shapes: Shapes | None = None

    def window(self, global_batch_size: int) -> int:
        """Global batches of a window."""
        return max(2, min(_WINDOW_BATCHES, _WINDOW_ROWS // global_batch_size))

    def regroup(
        self, sizes: Sequence[Sequence[SampleSize]], global_batch_size: int, key: Sequence[int]
    ) -> list[list[int]]:
        """Return the global batches of a window, as places in it.

        Args:
            sizes: Sizes of each row of the window, one entry a piece.
            global_batch_size: Rows of a global batch; an incomplete one comes last.
            key: Decides the order of the batches, with `kind` alike or bucket: the same key, the same order.
        """
        if self.shapes is not None:
            return self._by_bucket(sizes, global_batch_size, key)
        costs = [sum(getattr(size, self.by) for size in pieces) for pieces in sizes]
        whole = len(costs) // global_batch_size
        if self.kind == "even":
            used = whole * global_batch_size
            groups = [sorted(part) for part in even_split(costs[:used], whole)] if whole else []
        else:
            ranked = sorted(range(len(costs)), key=lambda place: (-costs[place], place))
            used = len(costs)
            # the rest is taken from the middle of the ranking, so that it has ordinary rows
            middle = (used - whole * global_batch_size, whole // 2 * global_batch_size)
            rest = ranked[middle[1] : middle[1] + middle[0]]
            ranked = ranked[: middle[1]] + ranked[middle[1] + middle[0] :]
            groups = [ranked[i : i + global_batch_size] for i in range(0, len(ranked), global_batch_size)]
            groups = _in_random_order(groups, key)
            return [*groups, rest] if rest else groups
        return [*groups, list(range(used, len(costs)))] if used < len(costs) else groups

    def bucket(self, sizes: Sequence[Sequence[SampleSize]]) -> int:
        """Return the bucket of a global batch of these rows; 0 where there are no buckets."""
        found = [size.bucket for pieces in sizes for size in pieces if size.bucket is not None]
        return self.shapes.common(found) if self.shapes is not None and found else 0

    def _by_bucket(
        self, sizes: Sequence[Sequence[SampleSize]], global_batch_size: int, key: Sequence[int]
    ) -> list[list[int]]:
        assert self.shapes is not None
        members: dict[int | None, list[int]] = {}
        for place, pieces in enumerate(sizes):
            members.setdefault(pieces[0].bucket, []).append(place)
        groups: list[list[int]] = []
        rest = members.pop(None, [])  # rows that give no sample fit in anywhere
        for bucket in sorted((bucket for bucket in members if bucket is not None), key=self.shapes.rank):
            places = members[bucket]
            whole = len(places) // global_batch_size * global_batch_size
            groups += [places[i : i + global_batch_size] for i in range(0, whole, global_batch_size)]
            rest += places[whole:]
        mixed = [rest[i : i + global_batch_size] for i in range(0, len(rest), global_batch_size)]
        last = [mixed.pop()] if mixed and len(mixed[-1]) < global_batch_size else []
        return _in_random_order(groups + mixed, key) + last


def _in_random_order(groups: list[list[int]], key: Sequence[int]) -> list[list[int]]:
    raw = np.random.PCG64(np.random.SeedSequence(tuple(key))).random_raw(max(1, len(groups)))[: len(groups)]
    return [groups[place] for place in np.argsort(raw, kind="stable").tolist()]
