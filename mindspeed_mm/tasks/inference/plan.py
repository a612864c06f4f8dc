"""Divide requests into batches, and batches among processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mindspeed_mm.tasks.inference.prompts import PromptSize

#: limits of a batch without a stated size; prompts and answers of 16384 tokens take 0.9 GB of keys and values in a
#: model of 7 B parameters with 4 heads of them in bf16
_MOST_TOKENS = 16_384
_MOST_ROWS = 64


@dataclass(frozen=True)
class PlannedBatch:
    """A batch of one process.

    Attributes:
        indices: its requests.
        counts: whether its answers are written; False: the process only takes part in what others compute.
    """

    indices: tuple[int, ...]
    counts: bool = True


def plan_batches(
    sizes: Mapping[int, PromptSize], batch_size: int | None, *, answer: int = 0, longest: int | None = None
) -> list[tuple[int, ...]]:
    """Return batches of requests of like length, the same whatever the number of processes.

    Args:
        sizes: request → its size.
        batch_size: most requests of a batch; None: as many as prompts and answers of 16384 tokens are, with padding,
            and at most 64.
        answer: tokens of the longest answer, of all its beams.
        longest: tokens of a prompt from which on it is answered alone; None: there is no such limit.

    Returns:
        the requests of each batch; all of a batch have the same kinds of media.
    """
    if batch_size == 1:
        return [(index,) for index in sorted(sizes)]
    alone = [index for index, size in sizes.items() if longest is not None and size.tokens > longest]
    groups: dict[tuple[str, ...], list[int]] = {}
    for index in sorted(sizes.keys() - set(alone), key=lambda i: (sizes[i].tokens, i)):
        groups.setdefault(sizes[index].kinds, []).append(index)
    batches = []
    for _, group in sorted(groups.items()):
        while group:
            count = batch_size or _rows_that_fit([sizes[index].tokens for index in group[:_MOST_ROWS]], answer)
            batches.append(tuple(group[:count]))
            group = group[count:]
    return sorted([*batches, *((index,) for index in alone)])


def _rows_that_fit(prompts: Sequence[int], answer: int) -> int:
    """How many of the first prompts, which become longer, are answered together; at least one is."""
    counts = (count for count, tokens in enumerate(prompts, start=1) if count * (tokens + answer) > _MOST_TOKENS)
    return max(1, next(counts, len(prompts) + 1) - 1)


def share(batches: Sequence[tuple[int, ...]], rank: int, ranks: int) -> list[PlannedBatch]:
    """Return the batches of one process, where each process holds the model."""
    return [PlannedBatch(indices) for indices in batches[rank::ranks]]


def share_in_lockstep(
    batches: Sequence[tuple[int, ...]], sizes: Mapping[int, PromptSize], rank: int, ranks: int
) -> list[PlannedBatch]:
    """Return the batches of one process, where parameters are sharded: the n-th batches of all have the same media.

    The encoders of media are gathered from all processes when they run, so that all processes must run them. Where
    there are fewer batches than processes, the others repeat the first one.
    """
    groups: dict[tuple[str, ...], list[tuple[int, ...]]] = {}
    for indices in batches:
        groups.setdefault(sizes[indices[0]].kinds, []).append(indices)
    mine = []
    for _, group in sorted(groups.items()):
        for first in range(0, len(group), ranks):
            part = group[first : first + ranks]
            mine.append(PlannedBatch(part[rank]) if rank < len(part) else PlannedBatch(part[0], counts=False))
    return mine
