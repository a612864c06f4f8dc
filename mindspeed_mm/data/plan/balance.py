"""Assign the rows of a global batch to ranks, so that all ranks have equal costs in every micro-batch."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

_MOST_SWAPS = 200


def even_split(costs: Sequence[float], parts: int, loads: np.ndarray | None = None) -> list[list[int]]:
    """Split items into parts of equal number and costs that a greedy pass and swaps make nearly equal.

    Args:
        costs: Of each item; their number is a multiple of `parts`.
        parts: Number of parts.
        loads: Cost that each part has already, [parts]; None: zero.

    Returns:
        The items of each part, costliest first.
    """
    places = len(costs) // parts
    carried = np.zeros(parts) if loads is None else np.asarray(loads, dtype=np.float64).copy()
    chosen: list[list[int]] = [[] for _ in range(parts)]
    open_parts = [(load, part) for part, load in enumerate(carried.tolist())]
    heapq.heapify(open_parts)
    for item in sorted(range(len(costs)), key=lambda item: (-costs[item], item)):
        load, part = open_parts[0]
        chosen[part].append(item)
        carried[part] = load = load + costs[item]
        if len(chosen[part]) == places:
            heapq.heappop(open_parts)
        else:
            heapq.heapreplace(open_parts, (load, part))
    if places > 1:
        _swap(costs, chosen, carried)
    return chosen


def _swap(costs: Sequence[float], chosen: list[list[int]], carried: np.ndarray) -> None:
    """Swap items between the part that carries most and another one, as long as the most becomes less."""
    for _ in range(_MOST_SWAPS):
        high = int(np.argmax(carried))
        given = np.array([costs[item] for item in chosen[high]])
        best, found = 0.0, None
        for low in np.argsort(carried, kind="stable")[:4].tolist():
            gap = carried[high] - carried[low]
            moved = given[:, None] - np.array([costs[item] for item in chosen[low]])
            gains = np.minimum(moved, gap - moved)
            place = int(np.argmax(gains))
            if gains.flat[place] > best + 1e-6 * gap:
                best, found = float(gains.flat[place]), (low, *divmod(place, moved.shape[1]), float(moved.flat[place]))
        if found is None:
            return
        low, i, j, cost = found
        chosen[high][i], chosen[low][j] = chosen[low][j], chosen[high][i]
        carried[high] -= cost
        carried[low] += cost


def balance_ranks(costs: Sequence[float], ranks: int, micro_batches: int) -> list[list[list[int]]]:
    """Spread the rows of a global batch over ranks and micro-batches by cost.

    Ranks wait for each other in every micro-batch (FSDP gathers weights in each), so rows of like cost make up a
    micro-step: the costliest the first, and so on. Within it each rank takes as many rows, the rank with the least
    so far the costliest.

    Args:
        costs: Of each row; a multiple of ranks × micro-batches of them.
        ranks: Data-parallel ranks.
        micro_batches: Micro-batches of a rank.

    Returns:
        [rank][micro-batch] → indices of rows.
    """
    order = sorted(range(len(costs)), key=lambda row: (-costs[row], row))
    step = len(costs) // micro_batches
    spread: list[list[list[int]]] = [[] for _ in range(ranks)]
    loads = np.zeros(ranks)
    for first in range(0, len(costs), step):
        rows = order[first : first + step]
        for rank, part in enumerate(even_split([costs[row] for row in rows], ranks, loads)):
            spread[rank].append([rows[item] for item in part])
            loads[rank] += sum(costs[rows[item]] for item in part)
    return spread


def balance_micro_batches(costs: Sequence[float], spread: Sequence[Sequence[Sequence[int]]]) -> list[list[list[int]]]:
    """Order the rows that each rank has: its costliest into the first micro-batch, and so on, on all ranks alike.

    Args:
        costs: Of each row.
        spread: [rank][micro-batch] → indices of rows.
    """
    regrouped = []
    for batches in spread:
        size = len(batches[0])
        rows = sorted((row for batch in batches for row in batch), key=lambda row: (-costs[row], row))
        regrouped.append([rows[first : first + size] for first in range(0, len(rows), size)])
    return regrouped
