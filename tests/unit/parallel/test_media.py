"""Media of a micro-batch over ranks: which part is whose."""

from __future__ import annotations

from itertools import pairwise

import pytest

from mindspeed_mm.parallel.media import balanced_parts


@pytest.mark.parametrize(
    ("costs", "ranks", "expected"),
    [
        ([4, 4, 4, 4], 2, [2, 2]),
        ([16, 4, 4, 4, 4], 2, [1, 4]),
        ([1, 1], 4, [0, 1, 0, 1]),
        ([5], 2, [0, 1]),
        ([1, 100, 1], 3, [1, 1, 1]),
    ],
)
def test_parts_are_contiguous_and_balanced(costs: list[int], ranks: int, expected: list[int]) -> None:
    parts = balanced_parts(costs, ranks)
    assert [len(part) for part in parts] == expected
    assert parts[0].start == 0 and parts[-1].stop == len(costs)
    assert all(first.stop == second.start for first, second in pairwise(parts))
