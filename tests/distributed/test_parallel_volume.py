"""What parallelisms send for a layer, counted against formulas; that they add no all-reduce and no read by the host.

The benchmark `benchmarks/parallel_step.py` prints the same volumes.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.host_reads import HostRead, counted_host_reads
from tests.support.workers import RankPool

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")
#: of each layer beside the formula, as multiples: sums of the gradients of norms, and the numbers of tokens for experts
MOST_BESIDE = 1.02


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sys.path.insert(0, BENCHMARKS)
    from parallel_step import depths, model_directory

    path = tmp_path_factory.mktemp("parallel_volume")
    for has_experts in (False, True):
        for sizes in depths():
            model_directory(path, has_experts, sizes)
    return path


@pytest.fixture
def pool_of(ranks2: RankPool, ranks4: RankPool) -> Callable[[int], RankPool]:
    return {2: ranks2, 4: ranks4}.__getitem__


def volumes(name: str, folder: Path) -> tuple[Any, Any]:
    """What this rank sends for a layer, and outside of layers."""
    sys.path.insert(0, BENCHMARKS)
    from parallel_step import volume_of_a_layer

    return volume_of_a_layer(name, folder)


def ranks_of(name: str) -> int:
    sys.path.insert(0, BENCHMARKS)
    from parallel_step import LAYOUTS

    return LAYOUTS[name].ranks


def of_layouts(*always: str) -> list[Any]:
    sys.path.insert(0, BENCHMARKS)
    from parallel_step import LAYOUTS

    return [pytest.param(name, marks=() if name in always else pytest.mark.full) for name in LAYOUTS]


@pytest.mark.parametrize("name", of_layouts("ulysses-2", "ring-2", "experts-2", "tensor-2", "tensor-2-sequence"))
def test_a_layer_sends_what_the_formulas_say(name: str, folder: Path, pool_of: Callable[[int], RankPool]) -> None:
    """With context parallelism to the byte, forward and backward each."""
    for layer, outside in pool_of(ranks_of(name)).run(volumes, name, folder):
        found, expected = layer.parallel, layer.analytic
        assert expected.forward > 0
        if "experts" not in name and "tensor" not in name:
            assert (found.forward, found.backward) == (expected.forward, expected.backward)
            assert outside.backward == 0
        for one, other in ((found.forward, expected.forward), (found.backward, expected.backward)):
            assert other <= one <= MOST_BESIDE * other


# --- all-reduces and reads by the host


def step_of(name: str, folder: Path) -> tuple[int, list[list[HostRead]]]:
    """All-reduces beside `fully_shard` of a step of two micro-batches, and the host's reads of each of them.

    Args:
        name: of the layout; "data-2": none of them.

    Returns:
        the number of all-reduces, and reads from the beginning of each forward pass.
    """
    sys.path.insert(0, BENCHMARKS)
    from parallel_step import COUNTED, LAYOUTS, Layout, count_second_step, our_loop

    layout = Layout(2, LAYOUTS[name].flags if name in LAYOUTS else {}, has_experts=True)
    keys = {"loss_cfg": {"router_aux_loss_coef": 0.1}}
    with counted_host_reads() as reads:
        loop = our_loop(layout, folder, f"{name}-step", COUNTED, accumulation=2, model=keys)
        loop.backend.model.register_forward_pre_hook(lambda *_: reads.open())
        count = count_second_step(loop)
    assert len(reads.windows) == 6  # of two steps: before, and of each micro-batch
    return count.calls("all-reduce", "forward", "backward"), reads.windows[4:]


DISPATCH = "transformers/distributed/expert_parallel.py"


@pytest.fixture(scope="module")
def plain(folder: Path, ranks2: RankPool) -> list[tuple[int, list[list[HostRead]]]]:
    """Data parallelism alone."""
    return ranks2.run(step_of, "data-2", folder)


@pytest.mark.parametrize("name", ["ulysses-2", "ring-2", "experts-2", "tensor-2", "tensor-2-sequence"])
def test_no_read_by_the_host_is_added(name: str, folder: Path, ranks2: RankPool, plain: Any) -> None:
    """Nor an all-reduce by context parallelism, but the one of the router loss of each micro-batch."""
    for (all_reduces, passes), (expected, without) in zip(ranks2.run(step_of, name, folder), plain, strict=True):
        if name in ("ulysses-2", "ring-2"):
            assert all_reduces == expected + 2
        added = [
            Counter(r.file for r in own) - Counter(r.file for r in o) for own, o in zip(passes, without, strict=True)
        ]
        dispatch = {file: 1 for file in added[0] if file.endswith(DISPATCH)}  # of its one layer, forward
        assert added == ([dispatch, dispatch] if name == "experts-2" else [{}, {}])
        assert bool(dispatch) == (name == "experts-2")
