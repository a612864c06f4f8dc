"""--distributed-timeout-minutes: every group of a run has it, those too that others make for it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from mindspeed_mm.parallel import world
from tests.support.tiny_steps import TinySteps
from tests.support.workers import RankPool

MINUTES = 7


def timeouts_of(build: Callable[[], Any]) -> list[float]:
    """The timeouts, in minutes, of the groups that `build` makes."""
    before = set(dist.distributed_c10d._world.pg_map)
    build()
    made = set(dist.distributed_c10d._world.pg_map) - before
    return [g._get_backend(torch.device("cpu")).options._timeout.total_seconds() / 60 for g in made]


def of_replicas(config: Path) -> list[float]:
    """One copy of the parameters a rank: the mesh makes groups of its own."""
    return timeouts_of(lambda: TinySteps("fsdp2", fsdp2_config_path=str(config), distributed_timeout_minutes=MINUTES))


def of_a_pipeline() -> list[float]:
    return timeouts_of(lambda: TinySteps("ptd", pipeline_model_parallel_size=2, distributed_timeout_minutes=MINUTES))


def of_a_tied_embedding() -> list[float]:
    run = TinySteps("ptd", pipeline_model_parallel_size=2, distributed_timeout_minutes=MINUTES)
    from mindspeed_mm.backends.tied_embedding import tied_embedding
    from mindspeed_mm.models.contract import Staged

    first = dist.get_rank() == 0
    chunk = SimpleNamespace(
        share_embeddings_and_output_weights=True,
        pre_process=first,
        post_process=not first,
        shared_embedding_or_output_weight=lambda: torch.nn.Parameter(torch.ones(1)),
    )
    return timeouts_of(lambda: tied_embedding([Staged(chunk)], run.backend.world, [0, 1], MINUTES))


def test_groups_of_a_mesh(ranks2: RankPool, tmp_path: Path) -> None:
    config = tmp_path / "fsdp2.yaml"
    config.write_text("sharding_size: 1\n")
    for found in ranks2.run(of_replicas, config):
        assert found and set(found) == {MINUTES}


def test_groups_of_a_pipeline_and_of_its_tied_embedding(megatron_pools: dict[int, RankPool]) -> None:
    for function in (of_a_pipeline, of_a_tied_embedding):
        for found in megatron_pools[2].run(function):
            assert found and set(found) == {MINUTES}


def test_the_group_of_the_host_beside_an_accelerator() -> None:
    """There the host's figures travel through a group of their own."""
    accelerator = mock.Mock()
    accelerator.is_host, accelerator.device.return_value = False, torch.device("meta")
    with (
        mock.patch.object(world.accelerator, "current", lambda: accelerator),
        mock.patch.multiple(
            world.dist,
            is_initialized=lambda: True,
            get_rank=lambda: 0,
            get_world_size=lambda: 1,
            new_group=mock.DEFAULT,
            group=SimpleNamespace(WORLD=object()),
        ) as patched,
    ):
        found = world.start_world("nccl", timeout_minutes=MINUTES)
    assert found.host.group is patched["new_group"].return_value
    assert patched["new_group"].call_args.kwargs["timeout"] == timedelta(minutes=MINUTES)
