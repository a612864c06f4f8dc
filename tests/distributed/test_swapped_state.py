"""--swap-optimizer: the same losses and states as without it, on both backends, and checkpoints of either go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.megatron_state import write
from tests.support.tiny_steps import Chunk, Line, Micro, TinySteps
from tests.support.workers import RankPool

FACTORS = (1.0, float("nan"), -2.0, 0.5)  # of a step's loss; the second one is skipped
FLAGS: dict[str, dict[str, Any]] = {
    "adam": {"lr": 0.01, "weight_decay": 0.1, "clip_grad": 1.0},
    "sgd": {"lr": 0.01, "optimizer": "sgd"},
    "distributed": {"lr": 0.01, "weight_decay": 0.1, "use_distributed_optimizer": True},
    "distributed, bf16": {"lr": 0.01, "weight_decay": 0.1, "use_distributed_optimizer": True, "bf16": True},
}


def _add_matrices(model: Any) -> None:
    """More than the one weight: a matrix whose rows two ranks share unevenly, and a bias."""
    generator = torch.Generator().manual_seed(2)
    model.matrix = nn.Parameter(torch.randn(33, 130, generator=generator))
    model.bias = nn.Parameter(torch.randn(130, generator=generator))


def _sum(model: Any) -> torch.Tensor:
    inputs = torch.linspace(-1.0, 1.0, 33, dtype=model.matrix.dtype)
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


ROWS = [
    pytest.param("fsdp2", 2, "adam", id="FSDP2, 2 ranks"),
    pytest.param("fsdp2", 1, "adam", id="FSDP2", marks=pytest.mark.full),
    pytest.param("fsdp2", 2, "sgd", id="FSDP2, SGD", marks=pytest.mark.full),
    pytest.param("ptd", 2, "distributed, bf16", id="Megatron, distributed optimizer, bf16"),
    pytest.param("ptd", 2, "distributed", id="Megatron, distributed optimizer", marks=pytest.mark.full),
    pytest.param("ptd", 1, "adam", id="Megatron", marks=pytest.mark.full),
    pytest.param("ptd", 2, "sgd", id="Megatron, SGD", marks=pytest.mark.full),
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
