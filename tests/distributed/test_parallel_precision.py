"""bf16, and fp16 with its dynamic loss scale, under context, expert and tensor parallelism, beside one process."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from mindspeed_mm.monitor.metrics import read_metrics
from tests.support.captured import captured, run_captured
from tests.support.parallel_case import Limits, ParallelCase, differences
from tests.support.parallel_models import LAYOUTS, MODELS, Layout, qwen3_moe_dir
from tests.support.workers import RankPool

BF16 = {"param_dtype": "bf16", "reduce_dtype": "fp32"}
#: Of two experts every token goes to both: among more, rounding to bf16 would change which are chosen.
TWO_EXPERTS = replace(MODELS["qwen3_moe"].family, make=functools.partial(qwen3_moe_dir, experts=2))
TESTED = {"qwen3": MODELS["qwen3"], "qwen3_moe": replace(MODELS["qwen3_moe"], family=TWO_EXPERTS)}


@functools.cache
def workspace() -> Path:
    return Path(tempfile.mkdtemp(prefix="parallel-precision-"))


@pytest.fixture(scope="module")
def cases(ranks1: RankPool, ranks2: RankPool) -> Any:
    """Model → its case."""
    pools = {1: ranks1, 2: ranks2}
    return functools.cache(lambda name: ParallelCase(name, TESTED[name], workspace() / name, pools))


# --- bf16

# bf16 rounds each operation by up to 2^-9 = 2.0e-3, and in another order on other ranks: a layout can't equal one
# process, but must be no farther from float32 than that is. Measured of one process: losses 4.7e-4, norms 2.9e-3, the
# worst gradient 2.7e-2 (of a norm of queries), weights 3.9e-3; of layouts no more, but for weights, 4.7e-3. The limits
# are two to four times that; a part of a gradient that is missing or counted twice makes 0.5 or more.
IN_BF16 = Limits(loss=1e-3, norm=1e-2, gradient=6e-2, weight=1e-2)
CASES = [(name, layout) for name in TESTED for layout in ("CP2 Ulysses", "CP2 ring", "TP2", "TP2 SP", "EP2")]
CASES.remove(("qwen3", "EP2"))
IN_SUITE = {("qwen3_moe", "CP2 ring"), ("qwen3_moe", "EP2"), ("qwen3_moe", "TP2 SP")}


@functools.cache
def bf16_alone(case: ParallelCase) -> Any:
    """The run of one process in bf16."""
    return case.run(LAYOUTS["1 process"], "padded", case.folder / "bf16", fsdp2=BF16)


@pytest.mark.parametrize(
    ("name", "layout"), [pytest.param(*case, marks=[] if case in IN_SUITE else [pytest.mark.full]) for case in CASES]
)
def test_bf16(name: str, layout: str, cases: Any, tmp_path: Path) -> None:
    case = cases(name)
    found = differences(case.run(LAYOUTS[layout], "padded", tmp_path / "run", fsdp2=BF16), case.plain("padded"))
    for figures in (found, differences(bf16_alone(case), case.plain("padded"))):
        assert figures.problems(IN_BF16) == []
        assert figures.gradient > 1e-3  # it was computed in bf16


# --- fp16

FP16 = {"param_dtype": "fp16", "reduce_dtype": "fp32"}
SPOILT, TRAINED, SCALE = 2, 5, 2.0**10
# fp16 rounds each operation by up to 2^-11 = 4.9e-4. Measured beside one process: losses 2.9e-5, norms 2.5e-4, weights
# 4.2e-4.
FP16_LOSS, FP16_NORM, FP16_WEIGHT = 1e-4, 2e-3, 1e-3


def column(lines: list[dict[str, Any]], name: str) -> list[Any]:
    return [line[name] for line in lines]


def run_with_an_overflow(words: list[str], script: str, folder: Path) -> None:
    """`run_captured`, with an infinity among what the first rank holds of the gradients of step SPOILT."""
    import torch.distributed as dist

    from mindspeed_mm.backends.fsdp2 import FSDP2Backend
    from mindspeed_mm.optimizer.clip import local_tensor

    run, number = FSDP2Backend.run, 0

    def run_and_spoil(self: FSDP2Backend, *args: Any, forward_only: bool) -> None:
        nonlocal number
        run(self, *args, forward_only=forward_only)
        number += not forward_only
        if number == SPOILT and not forward_only and dist.get_rank() == 0:
            own = [local_tensor(p.grad) for p in self._root.parameters() if p.grad is not None]
            next(part for part in own if part.numel()).view(-1)[0] = float("inf")

    with mock.patch.object(FSDP2Backend, "run", run_and_spoil):
        run_captured(words, script, folder, TRAINED)


def train_with_an_overflow(
    case: ParallelCase, pool: RankPool, layout: Layout, folder: Path
) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """What the last rank says of each step in metrics.jsonl, and the weights after the last step."""
    (folder / "run").mkdir(parents=True)
    flags = {"initial_loss_scale": SCALE, "hysteresis": 1, "loss_scale_window": 2, "train_iters": TRAINED}
    words = case.words(layout, "padded", folder, fsdp2=FP16, eval_interval=None, **flags)
    pool.run(run_with_an_overflow, words, case.model.script, folder / "run", timeout=120)
    steps = [line for line in read_metrics(folder / "run/metrics.jsonl") if "loss" in line]
    return steps, captured(folder / "run", "weights")


@functools.cache
def fp16_alone(case: ParallelCase, pool: RankPool) -> Any:
    """The run of one process in fp16."""
    return train_with_an_overflow(case, pool, LAYOUTS["1 process"], case.folder / "fp16")


@pytest.mark.parametrize(
    "layout", ["CP2 ring", "TP2 SP", *(pytest.param(name, marks=pytest.mark.full) for name in ("CP2 Ulysses", "TP2"))]
)
def test_an_overflow_of_one_rank_skips_the_step_of_all(
    layout: str, cases: Any, ranks1: RankPool, ranks2: RankPool, tmp_path: Path
) -> None:
    case = cases("qwen3")
    alone, expected = fp16_alone(case, ranks1)
    lines, weights = train_with_an_overflow(case, ranks2, LAYOUTS[layout], tmp_path)
    assert column(lines, "loss_scale") == column(alone, "loss_scale") == [SCALE, SCALE, SCALE / 2, SCALE / 2, SCALE]
    assert column(lines, "skipped_iterations") == column(alone, "skipped_iterations") == [0, 1, 1, 1, 1]
    assert [norm is None for norm in column(lines, "grad_norm")] == [False, True, False, False, False]
    assert column(lines, "loss") == pytest.approx(column(alone, "loss"), rel=FP16_LOSS)
    finite = [[norm for norm in column(run, "grad_norm") if norm is not None] for run in (lines, alone)]
    assert finite[0] == pytest.approx(finite[1], rel=FP16_NORM)
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert float((weights[name] - tensor).norm() / tensor.norm()) <= FP16_WEIGHT, name
