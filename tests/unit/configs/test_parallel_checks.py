"""The numbers that each parallelism must divide: what is reported, and the nearest valid number."""

from __future__ import annotations

import re

import pytest

from mindspeed_mm.configs.dims import Dims
from mindspeed_mm.configs.parallel_checks import (
    attention_in_ring,
    expert_rows_over_shards,
    experts_over_ranks,
    heads_over_ulysses,
    parts_over_tensor_ranks,
)


@pytest.mark.parametrize(
    ("dims", "heads", "nearest"),
    [
        (Dims(ulysses=8), 28, "--ulysses-degree-in-cp 4 with --context-parallel-algo hybrid_cp_algo, ring 2"),
        (Dims(ulysses=4), 7, "--context-parallel-algo megatron_cp_algo, a ring of 4"),
        (Dims(ring=2, ulysses=3), 4, "--ulysses-degree-in-cp 2 with --context-parallel-algo hybrid_cp_algo, ring 3"),
    ],
)
def test_heads_that_ulysses_ranks_cannot_share(dims: Dims, heads: int, nearest: str) -> None:
    (sentence,) = heads_over_ulysses("config.json", heads, dims)
    assert sentence.startswith(f"config.json: {heads} attention heads can't be shared by {dims.ulysses} Ulysses ranks;")
    assert sentence.endswith(f"with --context-parallel-size {dims.cp}: {nearest}")


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (experts_over_ranks("x", 60, Dims(dp=8, ep=8)), "60 experts can't be shared by 8 .* valid here: 1, 2, 4$"),
        (experts_over_ranks("x", 0, Dims(dp=8, ep=8)), "no experts to be split over 8 expert-parallel ranks; remove "),
        (
            expert_rows_over_shards("x", 6, Dims(dp=8, ep=2, ep_shard=4)),
            "6 can.t be sharded evenly by 4 ranks .* one of 1, 2$",
        ),
        (parts_over_tensor_ranks("x", 6, "key-value heads", Dims(tp=4)), "6 key-value heads .* 4 .* here: 1, 2$"),
        (attention_in_ring("x", "dropout", 0.1, Dims(ring=2)), r"has dropout \(0.1\), .* write 0 .* ulysses_cp_algo"),
    ],
)
def test_what_does_not_divide(found: list[str], sentence: str) -> None:
    assert len(found) == 1
    assert re.search("^x: .*" + sentence, found[0])


def test_what_fits_is_not_reported() -> None:
    assert not heads_over_ulysses("x", 28, Dims(ring=2, ulysses=4))
    assert not experts_over_ranks("x", 8, Dims(dp=4, ep=4)) and not experts_over_ranks("x", 0, Dims(dp=4))
    assert not expert_rows_over_shards("x", 6, Dims(dp=4, ep=2, ep_shard=2))
    assert not parts_over_tensor_ranks("x", 8, "attention heads", Dims(tp=4))
    assert not attention_in_ring("x", "dropout", 0.1, Dims(ulysses=2))
    assert not attention_in_ring("x", "dropout", 0.0, Dims(ring=2))


def test_heads_are_those_of_a_tensor_parallel_rank() -> None:
    assert not heads_over_ulysses("x", 8, Dims(ulysses=4, tp=2)) and not heads_over_ulysses("x", 9, Dims(tp=2))
    (sentence,) = heads_over_ulysses("x", 8, Dims(ulysses=8, tp=2))
    assert "8 attention heads, of which each tensor-parallel rank has 4, can't be shared by 8" in sentence
    assert sentence.endswith("--ulysses-degree-in-cp 4 with --context-parallel-algo hybrid_cp_algo, ring 2")
