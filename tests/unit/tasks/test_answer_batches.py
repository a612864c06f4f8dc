"""Batches of requests: of like length and media, of a stated size, or as many as their tokens allow."""

from __future__ import annotations

from mindspeed_mm.tasks.inference.plan import plan_batches
from mindspeed_mm.tasks.inference.prompts import PromptSize


def test_batches_by_tokens() -> None:
    """Without a stated size: at most 16384 tokens with padding and answers, at most 64 requests, at least one."""
    sizes = {index: PromptSize(100 + index % 7) for index in range(200)}
    batches = plan_batches(sizes, None, answer=20)
    assert sorted(index for batch in batches for index in batch) == list(range(200))
    assert sorted(map(len, batches)) == [8, 64, 64, 64]
    longer = plan_batches(sizes, None, answer=1024)
    assert max(map(len, longer)) == 14 and 15 * (100 + 1024) > 16_384
    assert all(len(batch) * (max(sizes[i].tokens for i in batch) + 1024) <= 16_384 for batch in longer)
    long = {0: PromptSize(20_000), 1: PromptSize(20_000), 2: PromptSize(7), 3: PromptSize(7, ("image",))}
    assert plan_batches(long, None, answer=512) == [(0,), (1,), (2,), (3,)]


def test_batches_of_a_stated_size() -> None:
    """Like lengths together, other media apart; prompts that leave no room for the longest answer alone."""
    sizes = {index: PromptSize(index * 37 % 101, ("image",) if index == 9 else ()) for index in range(10)}
    assert plan_batches(sizes, 1) == [(index,) for index in range(10)]
    assert plan_batches(sizes, 4) == [(0, 3, 6, 1), (4, 7, 2, 5), (8,), (9,)]
    assert plan_batches(sizes, 4, longest=90)[-2:] == [(8,), (9,)]
