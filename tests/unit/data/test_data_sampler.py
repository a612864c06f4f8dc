"""The global order: complete epochs, the same on every layout, continued from a number of samples."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from mindspeed_mm.utils.errors import ConfigError, DataError
from tests.unit.data.data_rows import flat
from tests.unit.data.rank_batches import RankBatches


def _take(count: int, **options: Any) -> list[list[int]]:
    """The first `count` micro-batches of a rank."""
    settings = {"num_rows": 16, "micro_batch_size": 1, "global_batch_size": 1, **options}
    return list(itertools.islice(RankBatches(**settings), count))


def _global_rows(batches: int, dp_size: int, **options: Any) -> list[list[int]]:
    """The rows of the first global batches, put together from all ranks, as sets in order."""
    ranks = []
    for rank in range(dp_size):
        sampler = RankBatches(dp_rank=rank, dp_size=dp_size, **options)
        each = sampler.micro_batches_per_global_batch
        taken = list(itertools.islice(sampler, batches * each))
        ranks.append([flat(taken[i * each : (i + 1) * each]) for i in range(batches)])
    return [sorted(flat(rank[i] for rank in ranks)) for i in range(batches)]


@pytest.mark.parametrize("stop", [5, 16, 21, 37])
def test_resume_continues_the_unbroken_sequence(stop: int) -> None:
    """S01: 16 rows, shuffled, stopped in epoch 1 and in epoch 2: the same sequence as unbroken."""
    whole = _take(48)
    assert whole[:stop] + _take(48 - stop, consumed_samples=stop) == whole
    assert sorted(flat(whole[16:32])) == list(range(16))


def test_orders_differ_by_epoch_and_repeat_by_seed() -> None:
    """S03: 6 rows, 3 epochs: complete, different, repeatable."""
    ids = flat(_take(18, num_rows=6))
    epochs = [ids[i : i + 6] for i in (0, 6, 12)]
    assert all(sorted(epoch) == list(range(6)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert flat(_take(18, num_rows=6)) == ids != flat(_take(18, num_rows=6, seed=7))


def test_order_is_fixed_for_good() -> None:
    """Checkpoints rely on it: an order may never change with a version of numpy or of ours."""
    sampler = RankBatches(8, 1, 1, seed=42)
    assert [sampler.order(epoch).tolist() for epoch in (0, 1)] == [EPOCH_0, EPOCH_1]


EPOCH_0 = [4, 1, 3, 6, 0, 7, 2, 5]
EPOCH_1 = [1, 2, 5, 3, 6, 0, 4, 7]


def test_without_shuffle_file_order() -> None:
    assert flat(_take(8, num_rows=4, shuffle=False)) == [0, 1, 2, 3, 0, 1, 2, 3]


@pytest.mark.parametrize("drop_last", [True, False])
def test_global_batches_dont_depend_on_the_layout(drop_last: bool) -> None:
    """K05: other ranks and micro-batches, and a resume between them: the same rows in every global batch."""
    options = {"num_rows": 22, "global_batch_size": 8, "drop_last": drop_last}
    layouts = [(1, 8), (1, 1), (2, 4), (2, 1), (4, 2), (8, 1)]
    reference = _global_rows(7, 1, micro_batch_size=8, **options)
    for dp_size, micro in layouts:
        assert _global_rows(7, dp_size, micro_batch_size=micro, **options) == reference
        resumed = _global_rows(4, dp_size, micro_batch_size=micro, consumed_samples=24, **options)
        assert resumed == reference[3:]


def test_rows_of_a_rank_and_micro_batch() -> None:
    """Micro-batch m of rank r takes rows m·mbs·dp + r·mbs onwards."""
    options = {"num_rows": 12, "micro_batch_size": 2, "global_batch_size": 12, "dp_size": 3, "shuffle": False}
    taken = [_take(2, dp_rank=rank, **options) for rank in range(3)]
    assert taken == [[[0, 1], [6, 7]], [[2, 3], [8, 9]], [[4, 5], [10, 11]]]


def test_incomplete_last_batch_is_filled_and_nothing_leaks() -> None:
    """H04: every row once an epoch, the rest of the last global batch are fillers, all ranks take as many steps."""
    options = {"num_rows": 10, "micro_batch_size": 2, "global_batch_size": 8, "drop_last": False}
    epochs = _global_rows(4, 2, **options)
    for first, last in (epochs[:2], epochs[2:]):
        assert last.count(-1) == 6 and sorted(first + last)[6:] == list(range(10))
    dropped = _global_rows(4, 2, **{**options, "drop_last": True})
    assert all(-1 not in batch and len(set(batch)) == 8 for batch in dropped)


def test_fewer_rows_than_a_global_batch() -> None:
    """H04: 3 rows, accumulation 4: refused with the numbers, or one step with a filler."""
    with pytest.raises(DataError, match=r"3 row\(s\).*global batch of 4.*at most 3.*drop_last to false"):
        _take(1, num_rows=3, global_batch_size=4)
    rows = flat(_take(8, num_rows=3, global_batch_size=4, drop_last=False))
    assert [sorted(rows[:4]), sorted(rows[4:])] == [[-1, 0, 1, 2]] * 2


def test_resume_in_the_second_epoch() -> None:
    """K07: 4 rows, 3 epochs, resumed at sample 6: the second half of epoch 2, then epoch 3."""
    options = {"num_rows": 4, "micro_batch_size": 2, "global_batch_size": 2}
    whole = _take(6, **options)
    assert _take(3, consumed_samples=6, **options) == whole[3:]
    assert sorted(flat(whole[2:4])) == [0, 1, 2, 3]


def test_position_inside_a_global_batch_goes_to_the_next_one() -> None:
    """After a run with another global batch size; the answer is the same at every later resume."""
    whole = _take(12, micro_batch_size=4, global_batch_size=4)
    for consumed in (5, 6, 7, 8):
        assert _take(4, micro_batch_size=4, global_batch_size=4, consumed_samples=consumed) == whole[2:6]


def test_numbers_of_an_epoch() -> None:
    kept = RankBatches(10, 2, 4, dp_size=2, drop_last=False)
    dropped = RankBatches(10, 2, 4, dp_size=2)
    assert (kept.global_batches_per_epoch, kept.samples_per_epoch) == (3, 12)
    assert (dropped.global_batches_per_epoch, dropped.samples_per_epoch) == (2, 8)
    assert kept.micro_batches_per_global_batch == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"micro_batch_size": 3, "global_batch_size": 8}, "--global-batch-size 8 is not a multiple"),
        ({"dp_size": 2, "global_batch_size": 3}, "2 data-parallel"),
        ({"dp_rank": 2, "dp_size": 2, "global_batch_size": 2}, "rank 2 of 2"),
        ({"num_rows": 0}, "no rows"),
        ({"consumed_samples": -1}, "consumed_samples -1"),
    ],
)
def test_impossible_sizes_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, DataError), match=words):
        _take(1, **options)
