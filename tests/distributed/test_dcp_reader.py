"""Regions of a torch_dcp folder that several ranks have written."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from tests.support.workers import RankPool
from tests.unit.checkpoint.test_dcp_reader import assert_regions_are_slices


def sharded() -> dict[str, torch.Tensor]:
    return {"rows": torch.arange(35.0).view(7, 5), "columns": torch.arange(60).view(6, 10).bfloat16()}


def save_sharded(folder: str) -> None:
    """Rows over two ranks (4 and 3 of them), columns over two ranks, and a replica."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    values = sharded()
    state = {
        "rows": distribute_tensor(values["rows"], mesh, [Shard(0)]),
        "columns": distribute_tensor(values["columns"], mesh, [Shard(1)]),
        "replica": distribute_tensor(values["rows"], mesh, [Replicate()]),
    }
    dcp.save(state, checkpoint_id=folder)


def test_regions_over_the_pieces_of_several_ranks_are_slices(ranks2: RankPool, tmp_path: Path) -> None:
    ranks2.run(save_sharded, str(tmp_path))
    assert len(list(tmp_path.glob("*.distcp"))) == 2
    assert_regions_are_slices(tmp_path, {**sharded(), "replica": sharded()["rows"]})
