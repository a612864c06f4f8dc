"""Balance over ranks and over experts, as maps of colours, and the lengths of rows, as bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_mm.monitor.report.lines import evenly_spread, read_object, whole_lines

_MOST_COLUMNS, _MOST_FRAMES, _MOST_CELLS = 120, 24, 40_000


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
        bars: of the histogram.
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
    if len(edges) != len(counts) + 1 or not counts or max(counts) <= 0 or edges[-1] <= edges[0]:
        return None
    span, most = edges[-1] - edges[0], max(counts)

    def place(length: float) -> float:
        return (length - edges[0]) / span

    bars = tuple(
        LengthBar(place(low), (high - low) / span, count / most, f"{low:,.0f} to {high:,.0f} tokens: {count:,.0f} rows")
        for low, high, count in zip(edges, edges[1:], counts)
    )
    capacity, padding = found.get("capacity"), found.get("padding")
    notes = [f"{found['rows']:,} rows"] if isinstance(found.get("rows"), int) else []
    if isinstance(capacity, int):
        notes.append(f"{capacity:,} tokens fit into a packed row")
    if isinstance(padding, (int, float)):
        notes.append(f"{100 * padding:.1f} % padding")
    return Lengths(
        bars,
        tuple((part / 4, f"{edges[0] + part / 4 * span:,.0f}") for part in range(5)),
        place(capacity) if isinstance(capacity, int) and edges[0] <= capacity <= edges[-1] else None,
        tuple(notes),
    )


def rank_maps(folder: Path) -> list[dict[str, Any]]:
    """Return maps of ranks over steps, of what differs between ranks."""
    lines = evenly_spread(
        [line for line in whole_lines(folder / "ranks.jsonl") if _step(line) is not None], _MOST_COLUMNS
    )
    maps = []
    for key, title, form in (
        ("cost", "Cost of a rank's batch, over the mean of all ranks", "number"),
        ("tokens", "Tokens of a rank, over the mean of all ranks", "number"),
        ("memory_bytes", "Memory of a rank's device", "gibibytes"),
    ):
        columns = [(_step(line), _numbers(line.get(key))) for line in lines]
        columns = [column for column in columns if len(column[1]) > 1]
        if not columns or len({len(values) for _, values in columns}) != 1:
            continue
        is_relative = form == "number"
        values = [_over_mean(column) if is_relative else [n / 2**30 for n in column] for _, column in columns]
        rows = [[_short(column[rank]) for column in values] for rank in range(len(values[0]))]
        frame = {"label": "", "values": rows}
        maps.append(_map(title, "rank", "step", form, is_relative, [step for step, _ in columns], [frame]))
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


def _over_mean(values: Sequence[float]) -> list[float]:
    mean = sum(values) / len(values)
    return [value / mean if mean else 0.0 for value in values]


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
