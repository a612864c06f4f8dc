"""What our step does beyond a bare loop on the same micro-batches, counted: little, and nothing for each layer.

The benchmark `benchmarks/step_cost.py` prints the same counts, and with --names which operators and functions they are.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.workers import RankPool

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")


def counted(part: str, folder: Path) -> tuple[dict[str, Any], dict[str, float]]:
    """Figure → what ours does beyond the bare loop; figure → largest ratio of both over the sizes."""
    sys.path.insert(0, BENCHMARKS)
    from step_cost import SIZES, beyond, count

    costs = {size: count(part, folder, *numbers) for size, numbers in SIZES.items()}
    ratios = {
        name: max(cost["ours"].figures()[name] / cost["bare"].figures()[name] for cost in costs.values())
        for name in RATIOS
    }
    return {name: (by.layer, by.micro_batch, by.step) for name, by in beyond(costs).items()}, ratios


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sys.path.insert(0, BENCHMARKS)
    from step_cost import SIZES, folder_of

    path = tmp_path_factory.mktemp("step_cost")
    for layers, _ in SIZES.values():
        folder_of(path, layers)
    return path


# at most, of each layer, of each micro-batch, and of each step
LIMITS = {
    "operators": (0, 24, 60),
    "values read by the host": (0, 6, 4),
    "collectives": (0, 0, 0),
    "Python and C calls": (0, 450, 300),
}
# at most, ours ÷ bare loop
RATIOS = {"operators": 1.05, "bytes allocated": 1.05}


@pytest.mark.parametrize(
    ("part", "ranks"),
    [
        pytest.param("fsdp2", 1, id="unsharded", marks=pytest.mark.full),
        pytest.param("fsdp2", 2, id="FSDP2, 2 ranks"),
        pytest.param("megatron", 1, id="Megatron"),
    ],
)
def test_a_step_adds_little_to_a_bare_loop(
    part: str, ranks: int, folder: Path, ranks1: RankPool, ranks2: RankPool, megatron_pools: dict[int, RankPool]
) -> None:
    pool = megatron_pools[ranks] if part == "megatron" else {1: ranks1, 2: ranks2}[ranks]
    for found, ratios in pool.run(counted, part, folder):
        too_much = {
            name: found[name]
            for name, most in LIMITS.items()
            if any(by > at_most for by, at_most in zip(found[name], most))
        }
        assert not too_much, f"of each layer, micro-batch and step: {too_much}; at most {LIMITS}; all: {found}"
        assert all(ratios[name] <= most for name, most in RATIOS.items()), (ratios, found)
