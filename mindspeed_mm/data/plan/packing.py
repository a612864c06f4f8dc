"""Pack samples up to a number of tokens, with little padding, and none much more costly than the others."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence

import numpy as np

#: largest cost of a pack over the mean; a smaller factor makes costs more even and adds padding
_MOST_COST = 1.05
#: the fullest packs with enough space for an item, which are looked at one by one; the others by bisection
_LOOKED_AT = 8
#: items that are looked at for the pack of the item that has waited longest, and don't go into it
_PASSED_OVER = 64

_SHIFT = 32  # a room is kept as (tokens left) << _SHIFT | pack: integers are compared faster than pairs
_PACK = (1 << _SHIFT) - 1


def best_fit_decreasing(
    lengths: Sequence[int] | np.ndarray,
    capacity: int,
    costs: Sequence[float] | np.ndarray | None = None,
    most_cost: float = 0.0,
) -> list[list[int]]:
    """Pack items: the longest first, each into the fullest pack with enough space for it.

    A pack that can take no remaining item any more is set aside, items of one length are placed several at a time, and
    the search for a pack that the item doesn't make too costly is bounded: n items take O(n log n) steps.

    Args:
        lengths: Length of each item, at least 1 and at most `capacity`.
        capacity: Capacity of a pack.
        costs: Cost of each item; None: costs are ignored.
        most_cost: Largest cost of a pack of several items.

    Returns:
        Packs as indices of items, longest first, in the order in which they were opened.
        Source: Johnson (1973), best fit decreasing: at most 11/9 of the fewest packs, plus a constant.
    """
    if not len(lengths):
        return []
    sizes = np.asarray(lengths, dtype=np.int64)
    prices = np.zeros(len(sizes)) if costs is None else np.asarray(costs, dtype=np.float64)
    order = np.argsort(-sizes, kind="stable")  # of one length in their order, so that costly and cheap ones are mixed
    sizes, prices = sizes[order], prices[order]
    ends = np.searchsorted(-sizes, -sizes, side="right").tolist()  # of the items of one length
    cheapest = [*np.minimum.accumulate(prices[::-1])[::-1].tolist(), 0.0]
    spending = np.concatenate(([0.0], np.cumsum(prices))).tolist()  # on all items before
    items, long, dear, shortest = order.tolist(), sizes.tolist(), prices.tolist(), int(sizes[-1])
    packs: list[list[int]] = []
    budgets: list[float] = []  # left of the largest cost
    rooms: list[int] = []  # sorted
    first = 0
    while first < len(items):
        length, spent = long[first], spending[first]
        place = _place_of(bisect_left(rooms, length << _SHIFT), rooms, budgets, dear[first])
        if place < 0:
            room, pack = capacity, len(packs)
            packs.append([])
            budgets.append(most_cost)
        else:
            key = rooms.pop(place)
            room, pack = key >> _SHIFT, key & _PACK
        last = min(ends[first], first + room // length)
        if spending[last] - spent > budgets[pack]:
            last = max(first + 1, bisect_right(spending, spent + budgets[pack], first, last) - 1)
        packs[pack] += items[first:last]
        budgets[pack] -= spending[last] - spent
        room -= length * (last - first)
        if room >= shortest and budgets[pack] >= cheapest[last]:
            insort(rooms, room << _SHIFT | pack)
        first = last
    return packs


def _place_of(low: int, rooms: Sequence[int], budgets: Sequence[float], cost: float) -> int:
    """The place of the fullest pack, from `low` on, that can take `cost` more; -1: none was found.

    The fuller a pack, the less it can spend, but for exceptions: these are looked at one by one next to `low` only.
    """
    last = len(rooms) - 1
    if low > last:
        return -1
    near = min(last, low + _LOOKED_AT)
    for place in range(low, near + 1):
        if cost <= budgets[rooms[place] & _PACK]:
            return place
    low, place, step = near, near, 1
    while cost > budgets[rooms[place] & _PACK]:
        if place == last:
            return -1
        low, place, step = place, min(last, place + step), 2 * step
    while place - low > 1:
        middle = (low + place) // 2
        if cost <= budgets[rooms[middle] & _PACK]:
            place = middle
        else:
            low = middle
    return place


def choose_packs(
    lengths: Sequence[int] | np.ndarray, costs: Sequence[float] | np.ndarray, capacity: int, count: int
) -> list[list[int]]:
    """Choose some of the waiting items and pack them tightly: those that fit badly keep waiting.

    The item that has waited longest (number 0) is always among them, so that none waits forever; the longest items
    that fit are added to its pack.

    Args:
        lengths: Length of each item, at least 1 and at most `capacity`; enough items to fill more than `count` packs.
        costs: Cost of each item.
        capacity: Capacity of a pack.
        count: Number of packs to choose.

    Returns:
        `count` packs as indices of items, each in the order of the items.
    """
    sizes, prices = np.asarray(lengths, dtype=np.int64), np.asarray(costs, dtype=np.float64)
    # a running sum: another order of adding may round otherwise, and every rank must come to the same packs
    most_cost = _MOST_COST * float(np.cumsum(prices)[-1]) / int(sizes.sum()) * capacity
    first = _pack_of_the_oldest(sizes, prices, capacity, most_cost)
    is_left = np.ones(len(sizes), dtype=bool)
    is_left[first] = False
    rest = np.flatnonzero(is_left)
    places = best_fit_decreasing(sizes[rest], capacity, prices[rest], most_cost)
    rest_sizes, rest_items = sizes[rest].tolist(), rest.tolist()
    filled = [sum([rest_sizes[place] for place in pack]) for pack in places]
    chosen = sorted(range(len(places)), key=lambda pack: (-filled[pack], min(places[pack])))[: count - 1]
    return [sorted(first), *([rest_items[place] for place in sorted(places[pack])] for pack in chosen)]


def _pack_of_the_oldest(sizes: np.ndarray, prices: np.ndarray, capacity: int, most_cost: float) -> list[int]:
    """Item 0 and the longest of the others that fit; `_PASSED_OVER` of them at most may be too costly."""
    order = np.argsort(-sizes, kind="stable")
    falling = -sizes[order]
    pack, room, spent = [0], capacity - int(sizes[0]), float(prices[0])
    place, passed = int(np.searchsorted(falling, -room)), 0
    while place < len(order) and passed < _PASSED_OVER:
        item = int(order[place])
        if item == 0 or spent + float(prices[item]) > most_cost:
            passed += 1
            place += 1
            continue
        pack.append(item)
        room -= int(sizes[item])
        spent += float(prices[item])
        place = max(place + 1, int(np.searchsorted(falling, -room)))
    return pack
