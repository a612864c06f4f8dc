"""Cases of a training step itself, on both backends: a global batch that holds nothing to train on."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.tiny_steps import Micro, TinySteps, own_part
from tests.support.workers import RankPool

BACKENDS = ("fsdp2", "ptd")
TRAINED, EMPTY = [[Micro(2.0)], [Micro(1.0)]], [[Micro(0.0, factor=0.0)], [Micro(0.0, factor=0.0)]]
HALF = [[Micro(0.0, factor=0.0)], [Micro(1.0)]]
# the same where the loss function returns means, beside which it may say how many targets they are of
MEANS = {0: Micro(None, {"loss": (0.0, 0.0)}, 0.0), 1: Micro(None, {"loss": (1.0, 1.0)}), None: Micro(None, factor=0.0)}


@pytest.fixture
def pools(ranks2: RankPool, megatron_pools: dict[int, RankPool]) -> dict[str, RankPool]:
    """Two workers of each backend."""
    return {"fsdp2": ranks2, "ptd": megatron_pools[2]}


def states_and_results(kind: str, plan: Any, flags: dict[str, Any]) -> list[tuple[Any, Any]]:
    """(state afterwards, result) of each step."""
    run = TinySteps(kind, **flags)
    found = []
    for micros in own_part(plan):
        result = run.step(micros)
        found.append((run.state(), result))
    return found


SETTINGS: dict[str, dict[str, Any]] = {
    "adam": {"lr_warmup_iters": 10, "ema_decay": 0.9},
    "sgd": {"optimizer": "sgd", "sgd_momentum": 0.9},
    "fp16": {"fp16": True, "loss_scale_window": 2, "initial_loss_scale": 8.0},
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("kind", BACKENDS)
def test_w03_a_global_batch_without_targets_is_a_skipped_step(
    pools: dict[str, RankPool], kind: str, settings: str
) -> None:
    """W03: weights, momenta, averages, schedule and loss scale stand still; it is skipped, and says why."""
    plan = [TRAINED, EMPTY, HALF, EMPTY, TRAINED]
    for ranks in pools[kind].run(states_and_results, kind, plan, SETTINGS[settings]):
        states, results = zip(*ranks, strict=True)
        assert [r.skip_reason for r in results] == ["", "no targets", "", "no targets", ""]
        assert states[1] == states[0] and states[3] == states[2]
        assert states[0][0] != states[2][0] != states[4][0]
        assert results[1].loss != results[1].loss and results[2].loss == results[2].loss


@pytest.mark.parametrize("kind", BACKENDS)
def test_w03_so_it_is_where_the_loss_is_a_mean(pools: dict[str, RankPool], kind: str) -> None:
    """W03: also where the loss function returns a mean of targets; one that doesn't say how many is always of some."""
    plan = [[[MEANS[0], MEANS[1]]] * 2, [[MEANS[0]] * 2] * 2, [[MEANS[0]] * 2, [MEANS[1]] * 2], [[MEANS[None]]] * 2]
    for ranks in pools[kind].run(states_and_results, kind, plan, {}):
        states, results = zip(*ranks, strict=True)
        assert [r.skip_reason for r in results] == ["", "no targets", "", ""]
        assert states[1] == states[0] != states[2] != states[3]
        assert results[0].loss == 1.5 and results[0].metrics == {}
