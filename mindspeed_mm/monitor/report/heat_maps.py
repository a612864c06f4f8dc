"""Balance over ranks and over experts, as maps of colours, and the lengths of rows, as bars."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_mm.monitor.console import words
from mindspeed_mm.monitor.report.lines import evenly_spread, whole_lines
from mindspeed_mm.utils.files import read_object

_MOST_COLUMNS, _MOST_FRAMES, _MOST_CELLS, _MOST_RANKS = 120, 24, 40_000, 64
#: texts on the axis of lengths
_TICKS = 9


@dataclass(frozen=True)
class LengthBar:
    """A bar of the histogram, in parts of its width and height of 1."""

    left: float
    width: float
    height: float
    title: str


@dataclass(frozen=True)
class Lengths:
    """Lengths of rows in tokens.

    Attributes:
        bars: of the histogram, equally wide, whatever the bins.
        ticks: places on the axis, with their texts.
        capacity: place of the longest row or pack; None: it isn't shown.
        notes: numbers in words.
    """

    bars: tuple[LengthBar, ...]
    ticks: tuple[tuple[float, str], ...]
    capacity: float | None
    notes: tuple[str, ...]


def lengths_of(folder: Path) -> Lengths | None:
    """Return the histogram of lengths of a run; None: there is none."""
    found = read_object(folder / "lengths.json")
    histogram = found.get("histogram")
    histogram = histogram if isinstance(histogram, dict) else {}
    edges, counts = _numbers(histogram.get("edges")), _numbers(histogram.get("counts"))
    if len(edges) != len(counts) + 1 or not counts or max(counts) <= 0 or sorted(set(edges)) != edges:
        return None
    most, number = max(counts), len(counts)

    def place(length: float) -> float:
        """Where a length is on the axis, on which all bins are equally wide."""
        at = max(0, bisect_right(edges, length, hi=number) - 1)
        low, high = edges[at], edges[at + 1]
        return (at + (length - low) / max(high - low, 1)) / number

    bars = tuple(
        LengthBar(
            at / number,
            1 / number,
            count / most,
            f"{words.counted(int(count), 'row')} of {_bin(edges[at], edges[at + 1])}",
        )
        for at, count in enumerate(counts)
    )
    capacity, padding = found.get("capacity"), found.get("padding")
    whose = "read by a rank so far" if found.get("of") == "read" else "in the data"
    notes = [f"{found['rows']:,} rows {whose}"] if isinstance(found.get("rows"), int) else []
    if isinstance(capacity, int):
        notes.append(f"{capacity:,} tokens fit into a packed row")
    if isinstance(padding, (int, float)):
        notes.append(f"{100 * padding:.1f} % padding")
    return Lengths(
        bars,
        tuple((at / number, f"{edges[at]:,.0f}") for at in evenly_spread(range(number + 1), _TICKS)),
        place(capacity) if isinstance(capacity, int) and edges[0] <= capacity <= edges[-1] else None,
        tuple(notes),
    )


def _bin(low: float, high: float) -> str:
    return words.counted(int(low), "token") if high - low <= 1 else f"{low:,.0f} to {high - 1:,.0f} tokens"


def rank_maps(folder: Path) -> list[dict[str, Any]]:
    """Return maps of ranks over steps, of what differs between ranks.

    Of very many ranks a line has the extremes, by number: the ranks of most lines are shown, with gaps.
    """
    found = [line for line in whole_lines(folder / "ranks.jsonl") if _step(line) is not None]
    lines = evenly_spread(found, _MOST_COLUMNS)
    maps = []
    for key, numbers, title, form in (
        ("cost", "ranks", "Cost of a rank's batch, over the mean", "number"),
        ("tokens", "ranks", "Tokens of a rank, over the mean", "number"),
        ("memory_bytes", "memory_ranks", "Memory of a process's device, at most so far", "gibibytes"),
    ):
        columns = {_step(line): _by_rank(line, key, numbers) for line in lines}
        columns = {step: column for step, column in columns.items() if len(column) > 1}
        counts = Counter(rank for column in columns.values() for rank in column)
        ranks = sorted(rank for rank, _ in counts.most_common(_MOST_RANKS))
        if not ranks:
            continue
        is_relative = form == "number"
        scaled = [_over_mean(column) if is_relative else _in_gibibytes(column) for column in columns.values()]
        rows = [[_short(column[rank]) if rank in column else None for column in scaled] for rank in ranks]
        drawn = _map(title, "rank", "step", form, is_relative, list(columns), [{"label": "", "values": rows}])
        maps.append(drawn | {"rows": list(map(str, ranks))})
    return maps


def expert_map(folder: Path) -> dict[str, Any] | None:
    """Return the map of layers and experts at some of the steps; None: there are no experts."""
    lines = [line for line in whole_lines(folder / "experts.jsonl") if _step(line) is not None]
    layers = [name for name in _layers(lines[-1])] if lines else []
    if not layers:
        return None
    experts = len(_numbers(_layers(lines[-1])[layers[0]]))
    lines = [line for line in lines if list(_layers(line)) == layers]
    lines = evenly_spread(lines, max(1, min(_MOST_FRAMES, _MOST_CELLS // max(1, len(layers) * experts))))
    frames = []
    for line in lines:
        rows = [[_short(share * experts) for share in _numbers(_layers(line)[name])] for name in layers]
        if all(len(row) == experts for row in rows):
            frames.append({"label": f"step {_step(line):,}", "values": rows})
    if not frames or not experts:
        return None
    title = "Tokens of an expert, over an even share"
    return _map(title, "", "expert", "number", True, list(range(experts)), frames) | {"rows": layers}


def _map(
    title: str, row: str, column: str, form: str, is_relative: bool, columns: Sequence[Any], frames: Sequence[Any]
) -> dict[str, Any]:
    number = len(frames[0]["values"])
    return {
        "title": title,
        "row": row,
        "column": column,
        "form": form,
        "relative": is_relative,
        "rows": [str(index) for index in range(number)],
        "columns": columns,
        "frames": frames,
    }


def _by_rank(line: Mapping[str, Any], key: str, numbers: str) -> dict[int, float]:
    """Values of a line by rank; `numbers` names the list of ranks, which are all from 0 on without it."""
    values, ranks = _numbers(line.get(key)), line.get(numbers)
    if not isinstance(ranks, list):
        return dict(enumerate(values))
    return {rank: value for rank, value in zip(ranks, values) if isinstance(rank, int)}


def _over_mean(column: Mapping[int, float]) -> dict[int, float]:
    mean = sum(column.values()) / len(column)
    return {rank: value / mean if mean else 0.0 for rank, value in column.items()}


def _in_gibibytes(column: Mapping[int, float]) -> dict[int, float]:
    return {rank: value / 2**30 for rank, value in column.items()}


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _step(line: Mapping[str, Any]) -> int | None:
    return line["iteration"] if isinstance(line.get("iteration"), int) else None


def _layers(line: Mapping[str, Any]) -> Mapping[str, Any]:
    found = line.get("layers")
    return found if isinstance(found, dict) else {}


def _numbers(value: object) -> list[float]:
    """The numbers of a list; [] unless all are numbers."""
    found = value if isinstance(value, list) else []
    return [float(number) for number in found] if all(isinstance(n, (int, float)) for n in found) else []
