"""State in host memory or in 8 bits, on both backends: what it is worth, and that checkpoints of each form go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mindspeed_mm.optimizer.clip import local_tensor
from mindspeed_mm.optimizer.elementwise import AdamW
from mindspeed_mm.optimizer.guarded import GuardedOptimizer
from tests.support.apart import find_torchao
from tests.support.megatron_state import write
from tests.support.tiny_steps import Chunk, Line, Micro, TinySteps
from tests.support.workers import RankPool

ROWS_OF_MATRIX = 71  # uneven parts, of which each has enough values for a state in 8 bits
FACTORS = (1.0, float("nan"), -2.0, 0.5)  # of a step's loss; the second one is skipped
FLAGS: dict[str, dict[str, Any]] = {
    "adam": {"lr": 0.01, "weight_decay": 0.1, "clip_grad": 1.0},
    "sgd": {"lr": 0.01, "optimizer": "sgd"},
    "bf16": {"lr": 0.01, "weight_decay": 0.1, "bf16": True},
    "distributed": {"lr": 0.01, "weight_decay": 0.1, "use_distributed_optimizer": True},
    "distributed, bf16": {"lr": 0.01, "weight_decay": 0.1, "use_distributed_optimizer": True, "bf16": True},
}


def _add_matrices(model: Any) -> None:
    """More than the one weight: a matrix whose rows two ranks share unevenly, and a bias."""
    generator = torch.Generator().manual_seed(2)
    model.matrix = nn.Parameter(torch.randn(ROWS_OF_MATRIX, 130, generator=generator))
    model.bias = nn.Parameter(torch.randn(130, generator=generator))


def _sum(model: Any) -> torch.Tensor:
    inputs = torch.linspace(-1.0, 1.0, ROWS_OF_MATRIX, dtype=model.matrix.dtype)
    return (inputs @ model.matrix + model.bias).square().mean() + model.weight.sum()


class LineOfMatrices(Line):
    """On FSDP2."""

    def __init__(self) -> None:
        super().__init__()
        _add_matrices(self)

    def forward(self) -> torch.Tensor:
        return _sum(self)


class ChunkOfMatrices(Chunk):
    """On Megatron."""

    def __init__(self) -> None:
        super().__init__()
        _add_matrices(self)

    def forward(self) -> torch.Tensor:
        return _sum(self)


def half_chunk() -> nn.Module:
    """As Megatron trains in 16 bits: parameters in bfloat16, its optimizer keeps float32 ones."""
    return ChunkOfMatrices().bfloat16()


def _new(kind: str, flags: dict[str, Any], *, swaps: bool) -> TinySteps:
    chunk: Any = half_chunk if flags.get("bf16") else ChunkOfMatrices
    model = LineOfMatrices if kind == "fsdp2" else chunk
    return TinySteps(kind, model, swap_optimizer=swaps, **flags)


def _trained(run: TinySteps, steps: range) -> list[float]:
    return [run.step([Micro(factor=FACTORS[step])]).loss for step in steps]


def _everything(run: TinySteps) -> list[Any]:
    return [run.state(), [getattr(p, "full_tensor", lambda p=p: p)().tolist() for p in run.module().parameters()]]


def both_ways(kind: str, flags: dict[str, Any], folder: Path) -> list[tuple[list[float], list[Any]]]:
    """Losses and all state: without and with the flag, and going on from the other one's checkpoint."""
    found = []
    for swaps in (False, True):
        run = _new(kind, flags, swaps=swaps)
        losses = _trained(run, range(2))
        write(run.backend.snapshot({"iteration": 2}, detached=True), folder / f"swaps-{swaps}")
        found.append((losses + _trained(run, range(2, 4)), _everything(run)))
    for swaps in (False, True):
        for other in (False, True):
            run = _new(kind, flags, swaps=swaps)
            run.backend.load(folder / f"swaps-{other}", optimizer=True, rng=True, schedule=True)
            found.append((found[0][0][:2] + _trained(run, range(2, 4)), _everything(run)))
    return found


def beside_torchs() -> list[str]:
    """What differs from torch's fused AdamW over DTensors of uneven parts."""
    mesh = init_device_mesh("cpu", (2,))
    ends: list[list[torch.Tensor]] = []
    for ours in (True, False):
        model = nn.ModuleList([LineOfMatrices(), nn.Linear(3, 3)])
        with torch.no_grad():
            for number, param in enumerate(model.parameters()):
                param.copy_(torch.linspace(-1, 1, param.numel()).view_as(param) * (1 + number))
        fully_shard(model[0], mesh=mesh)
        options: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
        sharded, plain = list(model[0].parameters()), list(model[1].parameters())
        # torch's kernel takes the tensors of one mesh at a time
        groups = [{"params": [*sharded, *plain]}] if ours else [{"params": sharded}, {"params": plain}]
        optimizer: Any = AdamW(groups, **options) if ours else torch.optim.AdamW(groups, **options)
        guard = GuardedOptimizer(optimizer) if ours else None
        for factor in (0.7, 0.3, 0.9):
            for param in model.parameters():
                param.grad = torch.sin(param.detach() * 3 + factor)
            if guard is not None:
                guard.step(torch.tensor(factor), torch.tensor(True))
            else:
                optimizer.grad_scale, optimizer.found_inf = 1 / torch.tensor(factor), torch.zeros(())
                optimizer.step()
        states = [value for p in model.parameters() for _, value in sorted(optimizer.state[p].items())]
        assert all(s.placements == p.placements for p in sharded for s in optimizer.state[p].values() if s.dim())
        ends.append([local_tensor(t).detach() for t in (*model.parameters(), *states)])
    return [str(number) for number, (a, b) in enumerate(zip(*ends, strict=True)) if not torch.equal(a, b)]


def test_local_parts_are_stepped_as_torch_steps_dtensors(ranks2: RankPool) -> None:
    assert ranks2.run(beside_torchs) == [[], []]


def in_eight_bits(kind: str, flags: dict[str, Any], folder: Path) -> list[tuple[list[float], list[Any]]]:
    """Losses and weights: AdamW's; trained through; from two checkpoints and AdamW's; AdamW from the last one's."""
    find_torchao()
    coded = {**flags, "optimizer": "adam8bit"}
    found = []
    for name, own in (("adam", flags), ("coded", coded)):
        run = _new(kind, own, swaps=False)
        losses = _trained(run, range(2))
        for detached in (False, True):
            write(run.backend.snapshot({"iteration": 2}, detached=detached), folder / f"{name}-{detached}")
        found.append((losses + _trained(run, range(2, 4)), _everything(run)))
    sizes = [getattr(value, "codes", None) for state in _inner(run).state.values() for value in state.values()]
    assert sum(size is not None for size in sizes) == 2
    for name, own in (("coded-False", coded), ("coded-True", coded), ("adam-True", coded), ("coded-True", flags)):
        run = _new(kind, own, swaps=False)
        run.backend.load(folder / name, optimizer=True, rng=True, schedule=True)
        found.append((found[1][0][:2] + _trained(run, range(2, 4)), _everything(run)))
    return found


def _inner(run: TinySteps) -> Any:
    return getattr(run.backend.optimizer, "optimizer", run.backend.optimizer)


ROWS = [
    pytest.param("fsdp2", 2, "adam", id="FSDP2, 2 ranks"),
    pytest.param("fsdp2", 1, "adam", id="FSDP2", marks=pytest.mark.full),
    pytest.param("fsdp2", 2, "sgd", id="FSDP2, SGD", marks=pytest.mark.full),
    pytest.param("ptd", 2, "distributed, bf16", id="Megatron, distributed optimizer, bf16"),
    pytest.param("ptd", 2, "distributed", id="Megatron, distributed optimizer", marks=pytest.mark.full),
    pytest.param("ptd", 1, "adam", id="Megatron", marks=pytest.mark.full),
    pytest.param("ptd", 2, "sgd", id="Megatron, SGD", marks=pytest.mark.full),
    pytest.param("ptd", 2, "bf16", id="Megatron, bf16", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("kind", "ranks", "flags"), ROWS)
def test_swapping_changes_no_value(
    kind: str,
    ranks: int,
    flags: str,
    tmp_path: Path,
    ranks1: RankPool,
    ranks2: RankPool,
    megatron_pools: dict[int, RankPool],
) -> None:
    pool = megatron_pools[ranks] if kind == "ptd" else {1: ranks1, 2: ranks2}[ranks]
    for found in pool.run(both_ways, kind, FLAGS[flags], tmp_path):
        assert len(set(found[0][0])) == len(FACTORS)
        for losses, state in found[1:]:
            assert str(losses) == str(found[0][0])  # one of them isn't a number
            assert state == found[0][1]


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        pytest.param("fsdp2", "adam", id="FSDP2"),
        pytest.param("ptd", "distributed, bf16", id="Megatron, distributed optimizer, bf16"),
        pytest.param("ptd", "adam", id="Megatron", marks=pytest.mark.full),
    ],
)
def test_eight_bits_go_on_from_their_checkpoint_and_from_others(kind: str, flags: str, tmp_path: Path) -> None:
    pool = RankPool(2, megatron=kind == "ptd")  # processes of its own: torchao can be found in them afterwards
    try:
        by_rank = pool.run(in_eight_bits, kind, FLAGS[flags], tmp_path)
    finally:
        pool.close()
    for adam, through, *own, after_adam, before_adam in by_rank:
        assert str(through[0]) != str(adam[0]) or through[1] != adam[1]
        for losses, state in own:
            assert str(losses) == str(through[0]) and state == through[1]
        for losses, _ in (after_adam, before_adam):
            assert losses[2:] == pytest.approx(adam[0][2:], rel=2e-3)
