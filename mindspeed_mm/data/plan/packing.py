"""Pack samples up to a number of tokens, with little padding, and none much more costly than the others."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

#: largest cost of a pack over the mean; a smaller factor makes costs more even and adds padding
_MOST_COST = 1.05


def best_fit_decreasing(
    lengths: Sequence[int], capacity: int, costs: Sequence[float] | None = None, most_cost: float = 0.0
) -> list[list[int]]:
    """Pack items: the longest first, each into the fullest pack with enough space for it.

    Args:
        lengths: Length of each item, at most `capacity`.
        capacity: Capacity of a pack.
        costs: Cost of each item; None: costs are ignored.
        most_cost: Largest cost of a pack of several items.

    Returns:
        Packs as indices of items, longest first, in the order in which they were opened.
        Source: Johnson (1973), best fit decreasing: at most 11/9 of the fewest packs, plus a constant.
    """
    packs: list[list[int]] = []
    spent: list[float] = []
    rooms: list[tuple[int, int]] = []  # (room left, pack), sorted
    for item in _longest_first(lengths):
        length, cost = lengths[item], 0.0 if costs is None else costs[item]
        place = bisect_left(rooms, (length, -1))
        while costs is not None and place < len(rooms) and spent[rooms[place][1]] + cost > most_cost:
            place += 1
        if place == len(rooms):
            pack, room = len(packs), capacity
            packs.append([])
            spent.append(0.0)
        else:
            room, pack = rooms.pop(place)
        packs[pack].append(item)
        spent[pack] += cost
        if room > length:
            left = (room - length, pack)
            rooms.insert(bisect_left(rooms, left), left)
    return packs


def choose_packs(lengths: Sequence[int], costs: Sequence[float], capacity: int, count: int) -> list[list[int]]:
    """Choose some of the waiting items and pack them tightly: those that fit badly keep waiting.

    The item that has waited longest (number 0) is always among them, so that none waits forever; the longest items
    that fit are added to its pack.

    Args:
        lengths: Length of each item, at most `capacity`; enough items to fill more than `count` packs.
        costs: Cost of each item.
        capacity: Capacity of a pack.
        count: Number of packs to choose.

    Returns:
        `count` packs as indices of items, each in the order of the items.
    """
    most_cost = _MOST_COST * sum(costs) / sum(lengths) * capacity
    first, room, spent = [0], capacity - lengths[0], costs[0]
    for item in _longest_first(lengths):
        if item and lengths[item] <= room and spent + costs[item] <= most_cost:
            first.append(item)
            room -= lengths[item]
            spent += costs[item]
    taken = set(first)
    rest = [item for item in range(len(lengths)) if item not in taken]
    places = best_fit_decreasing([lengths[item] for item in rest], capacity, [costs[item] for item in rest], most_cost)
    others = [[rest[place] for place in pack] for pack in places]
    others.sort(key=lambda pack: (-sum(lengths[item] for item in pack), min(pack)))
    return [sorted(pack) for pack in [first, *others[: count - 1]]]


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda item: (-lengths[item], item))
