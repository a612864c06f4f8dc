"""The tokens that are sent to each expert, summed over ranks."""

from __future__ import annotations

from typing import Any

import torch

from mindspeed_mm.backends.sums import StepReducer, StepSums
from mindspeed_mm.data.loading.counting import BatchCounts
from mindspeed_mm.models.common.expert_load import RoutedTokens
from mindspeed_mm.parallel.world import start_world
from tests.support.workers import RankPool


def reduced_loads() -> list[dict[str, Any]]:
    """Three steps: experts come with the second one, on one rank before the other, as a metric does."""
    world = start_world("gloo", timeout_minutes=5)
    reducer, found = StepReducer(world), []
    for number in range(4):
        sums = StepSums(torch.float64, torch.device("cpu"))
        metrics: dict[str, Any] = {"other": 2.0} if number != 2 or world.rank else {"new": (6.0, 2.0)}
        if number > world.rank:
            metrics["routed"] = RoutedTokens(torch.tensor([1.0, 0.0, 3.0]), {"first": 2, "second": 1})
        for _ in range(2):
            sums.add((torch.tensor(1.0), 1, metrics))
        step = reducer.reduce(sums, torch.tensor(1.0), BatchCounts(), (False, False))
        read = step.figures(torch.tensor(1.0, dtype=torch.float64)).tolist()
        shares = None if step.load is None else step.load.shares()
        found.append({**step.result(read, learning_rate=0.0, loss_scale=1.0).metrics, "shares": shares})
    return found


def test_counts_are_summed_before_the_figures_are_made(ranks2: RankPool) -> None:
    load = {"expert_imbalance": 2.25, "dead_experts": 1.0}
    shares = {"first": [1.0, 0.0], "second": [1.0]}
    for rank, found in enumerate(ranks2.run(reduced_loads)):
        assert found == [
            {"other": 2.0, "shares": None},
            {"other": 2.0, "shares": None if rank else shares} | load,  # one that hasn't met them knows no names
            {"other": 2.0, "new": 3.0, "shares": shares} | load,
            {"other": 2.0, "shares": shares} | load,
        ]
