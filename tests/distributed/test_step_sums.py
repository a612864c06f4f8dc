"""What the step's one reduction tells of all ranks, and of each by itself, whatever metrics each of them meets."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mindspeed_mm.backends.sums import ReducedStep, StepReducer, StepSums, imbalance
from mindspeed_mm.data.loading.counting import BatchCounts, RankCounts
from mindspeed_mm.parallel.world import RankSet, start_world
from mindspeed_mm.utils.errors import ConfigError
from tests.support.tiny_steps import CountedCollectives, Micro, TinySteps, own_part
from tests.support.workers import RankPool

CPU = torch.device("cpu")


def new_sums() -> StepSums:
    return StepSums(torch.float64, CPU)


def reduce_steps(*, has_queue: bool) -> list[tuple[BatchCounts, list[float], tuple[bool, bool], dict[str, int]]]:
    """Three steps: a second kind of media comes with the second one, on one rank only.

    Args:
        has_queue: the host has a group of its own, as it has beside a device with a queue.
    """
    world = start_world("gloo", timeout_minutes=5)
    if has_queue:
        world = replace(world, host=RankSet(world.rank, world.size, dist.new_group(backend="gloo")))
    rank, reducer, found = dist.get_rank(), StepReducer(world), []
    for number in range(3):
        sums = new_sums()
        sums.add((torch.tensor(1.0), 1 + rank, {}))
        media = {"video": 1 + rank} if number and rank else {"image": 2}
        own = {"media": media, "row_ids": [rank], "wait_seconds": 0.5 + rank, "flops": 10.0 + 20 * rank}
        own["memory_bytes"] = (100 + rank) * (number > 0)
        counts = BatchCounts(1, 10, 20, 5, 4 * rank, **own)
        with CountedCollectives() as calls:
            reduced = reducer.reduce(sums, torch.tensor(2.0), counts, (rank == 1, number == rank))
        values = torch.stack([reduced.squared_norm, reduced.divisor, reduced.loss]).tolist()
        found.append((reduced.counts, values, (reduced.stop, reduced.log), calls))
    return found


@pytest.mark.parametrize("has_queue", [False, True], ids=["the device is the host", "a device with a queue"])
def test_one_reduction_tells_sums_and_the_worst_rank(ranks2: RankPool, has_queue: bool) -> None:
    """One of all figures, or, beside a device with a queue, one of each side."""
    once = {"all_reduce": 1 + has_queue}
    with_names = {**once, "all_gather_object": 1}
    media = [{"image": 4}, {"image": 2, "video": 2}, {"image": 2, "video": 2}]
    for rank, steps in enumerate(ranks2.run(partial(reduce_steps, has_queue=has_queue))):
        for number, (counts, values, requests, calls) in enumerate(steps):
            assert calls == (once if number == 2 else with_names)
            assert (values, requests) == ([4.0, 3.0, 2.0 / 3.0], (True, number < 2))
            expected = {"media": media[number], "row_ids": [rank], "wait_seconds": 1.5, "flops": 40.0}
            ranks = RankCounts([10.0, 30.0], [10, 10], [100, 101] if number else ())
            assert counts == BatchCounts(2, 20, 40, 10, 4, **expected, imbalance=1.5, ranks=ranks)


def test_ranks_that_share_rows_do_not_count_as_idle() -> None:
    assert imbalance([30.0, 0, 10, 0]) == 1.5
    assert imbalance([0.0, 0.0]) == 1.0


def test_metrics_are_means_of_micro_batches_or_of_what_they_say() -> None:
    """A number counts as one micro-batch; a pair brings its own denominator; a metric may be missing in some."""
    sums, one = new_sums(), torch.ones(())
    sums.add((one, 3, {"plain": 2.0, "pair": (torch.tensor(6.0), torch.tensor(3.0)), "loss": 9.0, "text": [1, 2, 3]}))
    sums.add((one, 1, {"plain": torch.tensor([4.0]), "pair": (2.0, 1.0)}))
    sums.add((one, 1, {"plain": 6.0}))
    names = ["pair", "plain", "absent"]
    reduced = ReducedStep(one, one, one, one > 0, names, sums.figures(names), BatchCounts(), False, False)
    result = reduced.result(reduced.figures(one).tolist(), learning_rate=0.0, loss_scale=1.0)
    assert result.metrics == {"pair": 2.0, "plain": 4.0}


@pytest.mark.parametrize(
    "first, second, said",
    [
        ((torch.ones(()), 3, {}), torch.ones(()), "return the same form for every micro-batch, with num_tokens 0"),
        ((torch.ones(()), {}), (torch.ones(()), 3, {}), "a step can't be divided by tokens and by micro-batches"),
        (
            (torch.ones(()), {"a": 1.0}),
            (torch.ones(()), {"a": (1.0, 2)}),
            "metric 'a' as a number .* and as a pair",
        ),
    ],
)
def test_two_forms_in_one_step_are_refused(first: Any, second: Any, said: str) -> None:
    sums = new_sums()
    sums.add(first)
    with pytest.raises(ConfigError, match=said):
        sums.add(second)


# --- on both backends

BACKENDS = ("fsdp2", "ptd")


@pytest.fixture
def pools(ranks2: RankPool, megatron_pools: dict[int, RankPool]) -> dict[str, RankPool]:
    """Two workers of each backend."""
    return {"fsdp2": ranks2, "ptd": megatron_pools[2]}


def metrics_of_steps(kind: str, plan: Any) -> list[tuple[Any, dict[str, int]]]:
    run = TinySteps(kind, lr=0.0)
    found = []
    for micros in own_part(plan):
        with CountedCollectives() as calls:
            result = run.step(micros)
        found.append((result, calls))
    return found


@pytest.mark.parametrize("kind", BACKENDS)
def test_a_metric_is_of_those_ranks_that_have_it(pools: dict[str, RankPool], kind: str) -> None:
    """Ranks return other names, other numbers of names, new ones later, or none; loss and norm are never touched."""
    plan = [
        [[Micro(metrics={"a": 1.0})], [Micro(metrics={"b": 3.0})]],
        [[Micro(metrics={"a": 1.0, "c": (8.0, 2.0)})], [Micro(metrics={"b": 5.0})]],
        [[Micro(), Micro(metrics={"a": 7.0})], [Micro(metrics={"a": 3.0, "b": 2.0, "c": (4.0, 4.0)}), Micro()]],
        [[Micro()], [Micro()]],
        [[Micro(metrics={"0": 2.0})], [Micro(metrics={"b": 3.0})]],
        [[Micro(metrics={"0": 4.0})], [Micro(metrics={"0": 2.0})]],
    ]
    expected = [{"a": 1.0, "b": 3.0}, {"a": 1.0, "b": 5.0, "c": 4.0}, {"a": 5.0, "b": 2.0, "c": 1.0}, {}]
    expected += [{"0": 2.0, "b": 3.0}, {"0": 3.0}]
    for steps in pools[kind].run(metrics_of_steps, kind, plan):
        assert [result.metrics for result, _ in steps] == expected
        assert {(result.loss, round(result.grad_norm, 6)) for result, _ in steps} == {(3.0, round(5**0.5, 6))}
        calls = [c for _, c in steps]
        met_new = [True, True, False, False, True, False]
        assert [c.get("all_gather_object", 0) for c in calls] == [int(new) for new in met_new]
        quiet = {str(sorted(c.items())) for c, new in zip(calls, met_new, strict=True) if not new}
        assert len(quiet) == 1  # no further collective for names that are known, whichever a rank has
        assert calls[0]["all_reduce"] == calls[2]["all_reduce"] + 1


def refusal_of_a_step(kind: str, plan: Any) -> str:
    with pytest.raises(ConfigError) as error:
        metrics_of_steps(kind, plan)
    return str(error.value)


@pytest.mark.parametrize("kind", BACKENDS)
def test_ranks_that_return_different_forms_are_refused(pools: dict[str, RankPool], kind: str) -> None:
    """All ranks say so, none waits for another."""
    for said in pools[kind].run(refusal_of_a_step, kind, [[[Micro(2.0)], [Micro(None)]]]):
        assert "a step can't be divided by tokens and by micro-batches at once" in said
    numbers = [[Micro(metrics={"a": 1.0})], [Micro(metrics={"a": (1.0, 2.0)})]]
    for said in pools[kind].run(refusal_of_a_step, kind, [numbers]):
        assert "returned its metric 'a' as a number for one micro-batch and as a pair" in said
