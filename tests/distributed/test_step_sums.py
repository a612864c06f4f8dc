"""What the step's one reduction tells of all ranks, and of each by itself."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from mindspeed_mm.backends.sums import StepSums, imbalance, means_of, reduce_step_sums
from mindspeed_mm.data.counting import BatchCounts
from mindspeed_mm.parallel.state import initialize_parallel
from tests.support.workers import RankPool


def reduce() -> tuple[BatchCounts, list[float], float, int]:
    state = initialize_parallel("gloo", 5)
    rank, calls, all_reduce = dist.get_rank(), 0, dist.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return all_reduce(*args, **kwargs)

    dist.all_reduce = counted
    try:
        own = {
            "media": {"image": 2, "video": rank},
            "row_ids": [rank],
            "wait_seconds": 0.5 + rank,
            "cost": 10.0 + 20 * rank,
        }
        counts = BatchCounts(1, 10, 20, 5, 100, 3, 4 * rank, **own)
        reduced = reduce_step_sums(torch.tensor([1.0, rank]), counts, ["image", "video"], rank == 1, state)
    finally:
        dist.all_reduce = all_reduce
    return reduced.counts, reduced.device.tolist(), reduced.stop, calls


def test_one_reduction_tells_sums_and_the_worst_rank(ranks2: RankPool) -> None:
    for rank, (counts, values, stop, calls) in enumerate(ranks2.run(reduce)):
        assert calls == 1
        assert (values, stop) == ([2.0, 1.0], 1.0)
        expected = {"media": {"image": 4, "video": 1}, "row_ids": [rank], "wait_seconds": 1.5, "cost": 40.0}
        assert counts == BatchCounts(2, 20, 40, 10, 200, 6, 4, **expected, imbalance=1.5)


def test_ranks_that_share_rows_do_not_count_as_idle() -> None:
    assert imbalance(torch.tensor([30.0, 0, 10, 0])) == 1.5
    assert imbalance(torch.zeros(2)) == 1.0


def test_metrics_are_means_of_micro_batches_or_of_what_they_say() -> None:
    """A number counts as one micro-batch; a pair brings its own denominator; a metric may be missing in some."""
    sums, one = StepSums(torch.float64, torch.device("cpu")), torch.ones(())
    sums.add((one, 3, {"plain": 2.0, "pair": (torch.tensor(6.0), torch.tensor(3.0)), "loss": 9.0, "text": [1, 2, 3]}))
    sums.add((one, 1, {"plain": torch.tensor([4.0]), "pair": (2.0, 1.0)}))
    sums.add((one, 1, {"plain": 6.0}))
    means = means_of(["pair", "plain", "absent"], sums.figures(["pair", "plain", "absent"]))
    assert {name: float(value) for name, value in means.items()} == {"pair": 2.0, "plain": 4.0, "absent": 0.0}
