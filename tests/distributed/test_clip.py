"""Norms, clipping and sums of gradients over any mixture of meshes, against whole tensors in one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from mindspeed_mm.optimizer.clip import (
    clip_factor,
    local_squared_norm,
    local_tensor,
    number_of_copies,
    scale_gradients,
    sum_plain_gradients,
)
from tests.support.workers import RankPool

RANKS = 4
SHAPES = {"plain": (3,), "fsdp": (5, 3), "hsdp": (6, 2), "tensor": (8, 3), "experts": (4, 6, 2), "none": (2, 2)}


def whole_gradients() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def spread(mesh: DeviceMesh, placements: list[Placement], whole: torch.Tensor) -> nn.Parameter:
    param = nn.Parameter(distribute_tensor(torch.zeros_like(whole), mesh, placements))
    param.grad = distribute_tensor(whole, mesh, placements)
    return param


def sharded_twice(mesh: DeviceMesh, whole: torch.Tensor) -> nn.Parameter:
    """Rows shared out over tensor-parallel ranks and each rank's rows over FSDP ranks: fully_shard's own placement."""
    linear = nn.Linear(whole.shape[1], whole.shape[0], bias=False)
    linear.weight = nn.Parameter(distribute_tensor(torch.zeros_like(whole), mesh["tp"], [Shard(0)]))
    fully_shard(linear, mesh=mesh["shard"])
    param = linear.weight
    assert isinstance(param, DTensor) and isinstance(param.placements[0], _StridedShard)
    own = whole.chunk(mesh.size(1))[mesh.get_local_rank("tp")].chunk(mesh.size(0))[mesh.get_local_rank("shard")]
    param.grad = DTensor.from_local(own.clone(), param.device_mesh, param.placements, run_check=False)
    return param


def parameters() -> dict[str, nn.Parameter]:
    """One of each kind that a model may hold together, with their gradients."""
    whole = whole_gradients()
    flat = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("shard",))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    experts = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert_shard", "experts"))
    plain, without = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2))
    plain.grad = whole["plain"].clone()
    return {
        "plain": plain,
        "fsdp": spread(flat, [Shard(0)], whole["fsdp"]),
        "hsdp": spread(square, [Replicate(), Shard(0)], whole["hsdp"]),
        "tensor": sharded_twice(both, whole["tensor"]),
        "experts": spread(experts, [Shard(1), Shard(0)], whole["experts"]),
        "none": without,
    }


def squared_norm(names: list[str]) -> float:
    made = parameters()
    chosen = [made[name] for name in names]
    copies = [number_of_copies(param, RANKS) for param in chosen]
    own = local_squared_norm(chosen, copies, torch.float64)
    total = torch.zeros((), dtype=torch.float64) if own is None else own
    dist.all_reduce(total)
    return float(total)


def clipped(max_norm: float) -> dict[str, torch.Tensor]:
    """Gradients after clipping, whole again; this rank's parts put together by hand, as what is tested may be wrong."""
    made = parameters()
    norm = torch.tensor(squared_norm(list(made))).sqrt()
    scale_gradients(made.values(), clip_factor(norm, max_norm))
    return {
        name: (param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad)
        for name, param in made.items()
        if param.grad is not None and name != "tensor"  # torch can't put a strided shard together in every version
    } | {"tensor": local_tensor(made["tensor"].grad)}  # type: ignore[arg-type]


@pytest.mark.parametrize("names", [[name] for name in SHAPES] + [list(SHAPES)], ids=lambda names: "+".join(names))
def test_norm_over_a_mixture_of_meshes(ranks4: RankPool, names: list[str]) -> None:
    whole = whole_gradients()
    expected = sum(float(whole[name].double().square().sum()) for name in names if name != "none")
    for found in ranks4.run(squared_norm, names):
        assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("max_norm", [1.0, 1000.0, 0.0])
def test_clipping_is_torchs_on_whole_gradients(ranks4: RankPool, max_norm: float) -> None:
    whole = [nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items() if name != "none"]
    for param, (name, gradient) in zip(whole, whole_gradients().items(), strict=False):
        assert name != "none"
        param.grad = gradient
    if max_norm:
        nn.utils.clip_grad_norm_(whole, max_norm)
    expected = {name: param.grad for name, param in zip(SHAPES, whole, strict=False)}
    for rank, found in enumerate(ranks4.run(clipped, max_norm)):
        tensor_parallel, shard = rank % 2, rank // 2
        part = expected["tensor"].chunk(2)[tensor_parallel].chunk(2)[shard]  # type: ignore[union-attr]
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, part if name == "tensor" else expected[name], rtol=1e-6, atol=1e-7)


def summed() -> list[torch.Tensor]:
    rank = dist.get_rank()
    flat = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("shard",))
    own = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("ranks", "own"))["own"]
    plain, idle, frozen = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    half = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    frozen.requires_grad_(False)
    plain.grad, half.grad = torch.full((2,), rank + 1.0), torch.full((2,), rank + 1.0, dtype=torch.bfloat16)
    if rank == 1:
        idle.grad = torch.ones(2)  # the other ranks made no gradient for it
    whole_unit = spread(own, [Shard(0)], torch.full((2,), rank + 1.0))  # ignored by FSDP: a mesh of this rank alone
    sharded = spread(flat, [Shard(0)], torch.arange(8.0))
    sum_plain_gradients([plain, idle, frozen, half, whole_unit, sharded], dist.group.WORLD)
    assert frozen.grad is None
    return [local_tensor(p.grad) for p in (plain, idle, half, whole_unit, sharded) if p.grad is not None]


def test_plain_gradients_are_summed_and_sharded_ones_left_alone(ranks4: RankPool) -> None:
    for rank, (plain, idle, half, whole_unit, sharded) in enumerate(ranks4.run(summed)):
        assert plain.tolist() == [10.0, 10.0] and idle.tolist() == [1.0, 1.0] and half.tolist() == [10.0, 10.0]
        assert whole_unit.tolist() == [10.0, 10.0] and sharded.tolist() == [2.0 * rank, 2.0 * rank + 1]


def copies() -> list[int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    placements = [
        [Replicate(), Replicate()],
        [Replicate(), Shard(0)],
        [Shard(1), Shard(0)],
        [_StridedShard(0, split_factor=2), Shard(0)],
        [_StridedShard(0, split_factor=2), Replicate()],
    ]
    found = []
    for placed in placements:
        local = DTensor.from_local(torch.zeros(2, 2), mesh, placed, run_check=False)
        found.append(number_of_copies(local, RANKS))
    return [number_of_copies(torch.zeros(2), RANKS), *found]


def test_who_holds_the_same_part(ranks4: RankPool) -> None:
    assert all(found == [4, 4, 2, 1, 1, 2] for found in ranks4.run(copies))


def partial() -> str:
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("shard",))
    try:
        number_of_copies(DTensor.from_local(torch.zeros(2), mesh, [Partial()], run_check=False), RANKS)
    except ValueError as error:
        return str(error)
    return ""


def test_a_part_that_is_still_to_be_summed_has_no_copies(ranks4: RankPool) -> None:
    assert all("parts of a sum" in found for found in ranks4.run(partial))
