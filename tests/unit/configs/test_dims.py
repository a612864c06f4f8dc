"""Sizes of the parallelisms: what follows from a launch, and what is reported where they don't fit."""

from __future__ import annotations

from typing import Any

import pytest

from mindspeed_mm.configs.dims import Dims
from mindspeed_mm.utils.errors import ConfigError


@pytest.mark.parametrize(
    ("world_size", "asked", "expected"),
    [
        (4, {}, Dims(dp=4)),
        (4, {"sharding_size": "auto"}, Dims(dp=4, dp_shard=4)),
        (4, {"sharding_size": 2}, Dims(dp=4, dp_shard=2)),
        (8, {"pp": 2, "tp": 2}, Dims(pp=2, tp=2, dp=2)),
        (8, {"ring": 2, "tp": 2, "sharding_size": "auto"}, Dims(ring=2, tp=2, dp=2, dp_shard=4)),
        (8, {"ulysses": 8, "sharding_size": 4}, Dims(ulysses=8, dp_shard=4)),
        (8, {"ulysses": 2, "tp": 2, "ep": 4}, Dims(ulysses=2, tp=2, dp=2, ep=4, ep_shard=2)),
        (8, {"ep": 2, "ep_shard": 1}, Dims(dp=8, ep=2)),
        (8, {"ep": 1, "ep_shard": 2}, Dims(dp=8)),
    ],
)
def test_data_parallel_ranks_are_what_is_left(world_size: int, asked: dict[str, Any], expected: Dims) -> None:
    found = Dims.of(world_size, **asked)
    assert found == expected and found.world_size == world_size
    assert found.dp_replicate * found.dp_shard * found.tp * found.pp == world_size
    assert found.expert_copies * found.ep_shard * found.ep * found.pp == world_size


@pytest.mark.parametrize(
    ("world_size", "asked", "message"),
    [
        (6, {"pp": 2, "tp": 2}, r"6 processes can't be split into groups of 4 \(pipeline 2 × .*one of 1, 2, 3, 6"),
        (4, {"sharding_size": 3}, r"run.yaml: sharding_size is 3, .* data-parallel size 4; valid here: auto, 1, 2, 4"),
        (8, {"tp": 2, "sharding_size": 8}, r"8, which does not divide the data-parallel size 4; valid"),
        (8, {"ring": 4, "sharding_size": 3}, r"size 2 × context-parallel size 4 = 8; valid here: auto, 1"),
        (4, {"sharding_size": 0}, r"sharding_size is 0"),
        (4, {"ep": 3}, r"expert_parallel_size is 3, which does not divide the 4 processes; valid here: 1, 2, 4"),
        (8, {"ep": 2, "ep_shard": 3}, r"run.yaml: ep_fsdp_size is 3, .* divide 4, .*: 1, 2, 4"),
    ],
)
def test_sizes_that_do_not_divide(world_size: int, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Dims.of(world_size, where="run.yaml", **asked)


def test_a_size_below_one() -> None:
    with pytest.raises(ValueError, match="ring is 0"):
        Dims(ring=0)
