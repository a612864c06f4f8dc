"""Sizes of the kinds of parallelism: what follows from a launch, and what is said where they don't fit."""

from __future__ import annotations

from typing import Any

import pytest

from mindspeed_mm.parallel.dims import Dims
from mindspeed_mm.utils.errors import ConfigError


@pytest.mark.parametrize(
    ("world_size", "asked", "expected"),
    [
        (4, {}, Dims(dp_replicate=4)),
        (4, {"sharding_size": "auto"}, Dims(dp_shard=4)),
        (4, {"sharding_size": 2}, Dims(dp_replicate=2, dp_shard=2)),
        (8, {"pp": 2, "tp": 2}, Dims(pp=2, tp=2, dp_replicate=2)),
        (8, {"cp": 2, "tp": 2, "ep": 4, "sharding_size": "auto"}, Dims(cp=2, tp=2, ep=4, dp_shard=2)),
    ],
)
def test_data_parallel_ranks_are_what_is_left(world_size: int, asked: dict[str, Any], expected: Dims) -> None:
    found = Dims.of(world_size, **asked)
    assert found == expected and found.world_size == world_size


@pytest.mark.parametrize(
    ("world_size", "asked", "message"),
    [
        (6, {"pp": 2, "tp": 2}, r"6 processes can't be split into groups of 4 \(pipeline 2 × .*one of 1, 2, 3, 6"),
        (4, {"sharding_size": 3}, r"run.yaml: sharding_size is 3, .* size 4; valid here: auto, 1, 2, 4"),
        (4, {"sharding_size": 0}, r"sharding_size is 0"),
    ],
)
def test_sizes_that_do_not_divide(world_size: int, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Dims.of(world_size, where="run.yaml", **asked)


def test_a_size_below_one() -> None:
    with pytest.raises(ValueError, match="cp is 0"):
        Dims(cp=0)
