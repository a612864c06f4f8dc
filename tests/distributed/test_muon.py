"""Muon over sharded matrices against one process, in float32, and its state from one layout to another."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.captured import whole
from tests.support.launch import metrics_of, run_entry
from tests.support.parallel_case import ParallelCase
from tests.support.parallel_models import LAYOUTS, MODELS
from tests.support.workers import RankPool

#: of `Dims.of` for four ranks
SIZES: dict[str, dict[str, Any]] = {
    "sharded over 4": {"sharding_size": 4},
    "2 copies, sharded over 2": {"sharding_size": 2},
    "tensor parallel 2, sharded over 2": {"tp": 2, "sharding_size": 2},
    "tensor parallel 4": {"tp": 4, "sharding_size": 1},
    "experts over 2, sharded over 2": {"ep": 2, "sharding_size": 4},
}
STEPS, FACTOR = 3, 0.5
MATRICES = 4 + 4  # four of them stacked in `experts`


class Layer(nn.Module):
    """Matrices whose sizes four ranks don't divide evenly but for those that tensor and expert parallelism split."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        shapes = {"tall": (7, 3), "wide": (3, 10), "column": (8, 6), "row": (5, 8), "experts": (4, 6, 5), "norm": (6,)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))


def sharded(layer: Layer, sizes: dict[str, Any]) -> None:
    """Shard a layer as a model is sharded, each parameter with its gradient after it."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    from mindspeed_mm.configs.dims import Dims
    from mindspeed_mm.parallel.meshes import build_meshes

    meshes = build_meshes(Dims.of(4, **sizes))
    experts = nn.Module()
    experts.stack, layer.experts = layer.experts, None
    for mesh, owner, name, dim in (
        (meshes.tensor, layer, "column", 0),
        (meshes.tensor, layer, "row", 1),
        (meshes.experts, experts, "stack", 0),
    ):
        if mesh is not None:
            tensor = distribute_tensor(getattr(owner, name).detach(), mesh, [Shard(dim)])
            setattr(owner, name, nn.Parameter(tensor))
    if meshes.expert_shards is not None:
        fully_shard(experts, mesh=meshes.expert_shards, shard_placement_fn=lambda _: Shard(1))
    layer.stacked = experts
    fully_shard(layer, mesh=meshes.parameters)


def part_of(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A whole tensor, sharded as `like`."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(like, DTensor):
        return tensor
    mesh, placements = like.device_mesh, like.placements
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    own = tensor[tuple(slice(start, start + length) for start, length in zip(offset, shape, strict=True))]
    return DTensor.from_local(
        own.clone(), mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def parameters_of(layer: nn.Module) -> dict[str, nn.Parameter]:
    return {name.replace("stacked.stack", "experts"): p for name, p in layer.named_parameters()}


def train(sizes: dict[str, Any] | None, fused: bool) -> tuple[dict[str, torch.Tensor], int]:
    """Weights and momenta, whole, after steps of which the device forbids one; how many matrices this rank computed."""
    from mindspeed_mm.optimizer import muon
    from mindspeed_mm.optimizer.guarded import GuardedOptimizer

    layer, count = Layer(), 0
    if sizes is not None:
        sharded(layer, sizes)
    named = parameters_of(layer)
    groups = [
        {"params": [p for p in named.values() if (p.dim() > 1) == matrices], "orthogonalized": matrices}
        for matrices in (True, False)
    ]
    optimizer = muon.Muon([{**g, "weight_decay": 0.1} for g in groups], lr=0.1, dtype=torch.float32, fused=fused)
    guard, function = GuardedOptimizer(optimizer), muon.orthogonalize

    def counted(matrix: torch.Tensor, *args: Any) -> torch.Tensor:
        nonlocal count
        count += matrix.size(0) if matrix.dim() == 3 else 1
        return function(matrix, *args)

    generator = torch.Generator().manual_seed(6)
    with mock.patch.object(muon, "orthogonalize", counted):
        for step in range(STEPS):
            for name in sorted(named):
                grad = torch.randn(named[name].shape, generator=generator)
                named[name].grad = part_of(grad, named[name]) * (float("nan") if step == 1 else 1.0)
            guard.step(torch.tensor(FACTOR), torch.tensor(step != 1))
            guard.finish_step(stepped=step != 1)
    found = {name: whole(param) for name, param in named.items()}
    found |= {f"{name} {key}": whole(v) for name, p in named.items() for key, v in optimizer.state[p].items()}
    return found, count


def train_all() -> list[tuple[dict[str, torch.Tensor], int]]:
    """`train` in every layout, with the first of them fused, too."""
    runs = [train(sizes, fused=False) for sizes in SIZES.values()]
    return [*runs, train(SIZES["tensor parallel 2, sharded over 2"], fused=True)]


def test_a_matrix_is_orthogonalised_whole_by_one_of_the_ranks_that_share_it(ranks4: RankPool) -> None:
    expected, count = train(None, fused=False)
    assert count == MATRICES * STEPS and expected["column momentum_buffer"].any()
    by_rank = ranks4.run(train_all)
    for number, layout in enumerate([*SIZES, "fused"]):
        for found, _ in (ranks[number] for ranks in by_rank):
            assert found.keys() == expected.keys(), layout
            for name, tensor in expected.items():
                worst = float((found[name] - tensor).abs().max())
                assert worst < 1e-5, (layout, name, worst)
    counts = {layout: [ranks[i][1] // STEPS for ranks in by_rank] for i, layout in enumerate(SIZES)}
    assert sum(counts["sharded over 4"]) == MATRICES and max(counts["sharded over 4"]) == MATRICES // 4
    assert sum(counts["experts over 2, sharded over 2"]) == MATRICES
    assert sum(counts["2 copies, sharded over 2"]) == 2 * MATRICES  # each copy by itself


def torchs_muon() -> tuple[float, float]:
    """How far torch's own Muon is from the update of a whole matrix: over a DTensor, and over each rank's part."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    whole_matrix, grad = Layer().column.detach(), torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    moved = []
    for spread in (
        lambda x: x.clone(),
        lambda x: distribute_tensor(x.clone(), mesh, [Shard(0)]),
        lambda x: x.chunk(2)[dist.get_rank()].clone(),
    ):
        param = nn.Parameter(spread(whole_matrix))
        param.grad = spread(grad)
        torch.optim.Muon([param], lr=0.1, weight_decay=0.0, adjust_lr_fn="match_rms_adamw").step()
        moved.append(param.detach())
    expected, sharded_, local = moved
    return float((sharded_.full_tensor() - expected).abs().max()), float(
        (local - expected.chunk(2)[dist.get_rank()]).abs().max()
    )


def test_torchs_own_muon_over_parts_is_silently_wrong(ranks2: RankPool) -> None:
    """Over a DTensor it gathers for every product, and differs by the rounding of bfloat16 only."""
    for as_dtensor, by_parts in ranks2.run(torchs_muon):
        assert as_dtensor < 3e-3 and by_parts > 1e-2


@functools.cache
def workspace() -> Path:
    return Path(tempfile.mkdtemp(prefix="muon-"))


class Runs:
    """Qwen3-MoE, or tied Qwen3, trained by Muon in any layout."""

    def __init__(self, model: str, pools: dict[int, RankPool]) -> None:
        self.pools, self.folder = pools, workspace() / model
        self.case = ParallelCase(model, MODELS[model], self.folder / "case", pools)

    def train(self, layout: str, name: str, **flags: Any) -> tuple[list[float], list[float]]:
        """Losses and norms of a run's steps."""
        muon = {"optimizer": "muon", "lr": "1e-2", "weight_decay": 0.1, "no_save_optim": None, "eval_interval": None}
        run = self.folder / name
        settings = {**muon, "train_iters": 4, "log_row_ids": None, "save": run, "ema_decay": 0.9, **flags}
        words = self.case.words(LAYOUTS[layout], "padded", self.folder / f"{name}-files", **settings)
        self.pools[LAYOUTS[layout].world].run(run_entry, words, timeout=170)
        return metrics_of(run)

    @functools.cached_property
    def unbroken(self) -> tuple[list[float], list[float]]:
        """The run of one process."""
        return self.train("1 process", "unbroken")

    def assert_goes_on(self, first: str, then: list[str]) -> None:
        """A run in one layout, saved after two steps, goes on in others as the run of one process does."""
        losses, norms = self.unbroken
        assert losses[-1] < losses[0] - 0.1
        found = self.train(first, f"saved {first}", exit_interval=2)
        assert found[0] == pytest.approx(losses[:2], rel=1e-5) and found[1] == pytest.approx(norms[:2], rel=1e-4)
        for layout in then:
            found = self.train(layout, f"{first} then {layout}", load=self.folder / f"saved {first}")
            assert found[0] == pytest.approx(losses[2:], rel=1e-5), layout
            assert found[1] == pytest.approx(norms[2:], rel=1e-4), layout


@pytest.fixture(scope="module")
def pools(ranks1: RankPool, ranks2: RankPool, ranks4: RankPool) -> dict[int, RankPool]:
    return {1: ranks1, 2: ranks2, 4: ranks4}


def test_a_checkpoint_goes_on_in_other_layouts(pools: dict[int, RankPool]) -> None:
    Runs("qwen3_moe", pools).assert_goes_on("EP2", ["1 process", "TP2 x FSDP2"])


@pytest.mark.full
@pytest.mark.parametrize("model", ["qwen3", "qwen3_moe", "qwen2_5_vl", "gpt_oss"])
def test_layouts_go_on_in_each_other(model: str, pools: dict[int, RankPool]) -> None:
    runs = Runs(model, pools)
    layouts = ["FSDP2", "HSDP 2x2", "TP2 x FSDP2", "CP2 ring"]
    layouts += [] if "experts" in MODELS[model].refused else ["EP2 x FSDP2", "TP2, EP2"]
    runs.assert_goes_on("FSDP2", ["1 process", *layouts[1:]])
    runs.assert_goes_on("HSDP 2x2", ["FSDP2"])
