"""Rows as the page shows them: samples that are trained, answers, and samples that are generated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_mm.checkpoint.run_folder import ANSWERS
from mindspeed_mm.monitor.report.lines import evenly_spread, whole_lines
from mindspeed_mm.monitor.report.pictures import PictureRoom

_SAMPLES = "samples.jsonl"
_GENERATED = "generated.jsonl"
_MOST_SAMPLES, _MOST_ANSWERED, _MOST_PROMPTS = 8, 12, 8
_MOST_COLUMNS = 8
#: share of the room that pictures of samples may take: what is generated has the rest
_OF_SAMPLES = 0.45


@dataclass(frozen=True)
class ShownPiece:
    """A piece of a row's text."""

    text: str
    is_trained: bool


@dataclass(frozen=True)
class ShownMedium:
    """A medium of a row: its pictures as data URLs, and what is known of it."""

    pictures: tuple[str, ...]
    title: str


@dataclass(frozen=True)
class ShownSample:
    """A row that the run trains on.

    Attributes:
        where: its file and place.
        notes: its length, and what was left out.
    """

    where: str
    notes: tuple[str, ...]
    pieces: tuple[ShownPiece, ...]
    media: tuple[ShownMedium, ...]


@dataclass(frozen=True)
class SheetRow:
    """What came of one prompt or row at several steps.

    Attributes:
        title: the prompt.
        note: the answer that was expected, or the seed.
        cells: one for each column; a text, or data URLs of pictures. None: there is nothing.
    """

    title: str
    note: str
    cells: tuple[SheetCell | None, ...]


@dataclass(frozen=True)
class SheetCell:
    """One result."""

    text: str = ""
    is_right: bool | None = None
    pictures: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sheet:
    """Results over the steps.

    Attributes:
        steps: of the columns.
        recorded: number of steps that have results.
    """

    steps: tuple[int, ...]
    rows: tuple[SheetRow, ...]
    recorded: int


def samples_of(folder: Path, room: PictureRoom) -> list[ShownSample]:
    """Return the recorded rows of a run.

    Args:
        folder: of what is recorded for the report.
        room: for their pictures.
    """
    kept = int(room.left * (1 - _OF_SAMPLES))
    room.left -= kept
    found = [_sample(line, room) for line in whole_lines(folder / _SAMPLES)[:_MOST_SAMPLES]]
    room.left += kept
    return found


def answers_of(run: Path) -> Sheet | None:
    """Return the answers to validation rows over the steps; None: there are none.

    Args:
        run: the run folder.
    """
    found = _by_place(whole_lines(run / ANSWERS))
    steps = evenly_spread(sorted({step for step, _ in found}), _MOST_COLUMNS)
    rows = []
    for index in sorted({index for _, index in found})[:_MOST_ANSWERED]:
        lines = [found.get((step, index)) for step in steps]
        last = next(line for line in reversed(lines) if line is not None) if any(lines) else None
        if last is None:
            continue
        expected = str(last.get("reference", ""))
        cells = tuple(None if line is None else _answer(line, expected) for line in lines)
        rows.append(SheetRow(str(last.get("prompt", "")), expected, cells))
    return Sheet(tuple(steps), tuple(rows), len({step for step, _ in found})) if rows else None


def generated_of(folder: Path, room: PictureRoom) -> Sheet | None:
    """Return what was generated of the same prompts over the steps; None: there is nothing.

    Args:
        folder: of what is recorded for the report.
        room: for the pictures: fewer steps are shown where it is small.
    """
    found = _by_place(whole_lines(folder / _GENERATED))
    all_steps = sorted({step for step, _ in found})
    indices = sorted({index for _, index in found})[:_MOST_PROMPTS]
    steps: list[int] = []
    for most in range(min(_MOST_COLUMNS, len(all_steps)), 0, -1):
        steps = evenly_spread(all_steps, most)
        files = [name for step in steps for index in indices for name in _files(found.get((step, index)))]
        if sum(room.size(name) or 0 for name in files) <= room.left:
            break
    rows = []
    for index in indices:
        lines = [found.get((step, index)) for step in steps]
        cells = tuple(None if line is None else SheetCell(pictures=_urls(_files(line), room)) for line in lines)
        known: Mapping[str, Any] = next((line for line in lines if line is not None), {})
        seed = known.get("seed")
        rows.append(SheetRow(str(known.get("prompt", "")), "" if seed is None else f"seed {seed}", cells))
    return Sheet(tuple(steps), tuple(rows), len(all_steps)) if any(_has_pictures(row) for row in rows) else None


def _sample(line: Mapping[str, Any], room: PictureRoom) -> ShownSample:
    pieces = [piece for piece in _list(line.get("pieces")) if isinstance(piece, dict)]
    media = [medium for medium in _list(line.get("media")) if isinstance(medium, dict)]
    return ShownSample(
        where=str(line.get("where", "")),
        notes=tuple(_notes(line)),
        pieces=tuple(ShownPiece(str(piece.get("text", "")), piece.get("is_trained") is True) for piece in pieces),
        media=tuple(ShownMedium(_urls(_thumbnails(medium), room), _title(medium)) for medium in media),
    )


def _notes(line: Mapping[str, Any]) -> Iterator[str]:
    tokens, trained = line.get("tokens"), line.get("trained")
    if isinstance(tokens, int):
        yield f"{tokens:,} tokens" + (f", {trained:,} of them trained" if isinstance(trained, int) else "")
    if isinstance(line.get("cut_from"), int):
        yield f"cut from {line['cut_from']:,} tokens"
    for key, what in (("pieces_left_out", "pieces of text"), ("media_left_out", "media")):
        if line.get(key):
            yield f"{line[key]} {what} more"


def _title(medium: Mapping[str, Any]) -> str:
    width, height, frames, seconds = (medium.get(key) for key in ("width", "height", "frames", "seconds"))
    size = f"{width} × {height}" if width and height else ""
    parts = [str(medium.get("kind", "")), size]
    parts += [f"{frames} frames"] if isinstance(frames, int) and frames > 1 else []
    parts += [f"{seconds:.3g} s"] if isinstance(seconds, (int, float)) else []
    return ", ".join(filter(None, parts))


def _answer(line: Mapping[str, Any], expected: str) -> SheetCell:
    text = str(line.get("answer", ""))
    return SheetCell(text, text.strip() == expected.strip())


def _by_place(lines: Sequence[dict[str, Any]]) -> dict[tuple[int, int], dict[str, Any]]:
    """Lines by step and number of the row; of one that was written twice, as by a run that went on, the later one."""
    return {
        (line["iteration"], line["index"]): line
        for line in lines
        if isinstance(line.get("iteration"), int) and isinstance(line.get("index"), int)
    }


def _thumbnails(medium: Mapping[str, Any]) -> Sequence[object]:
    return _list(medium.get("thumbnails")) or [medium.get("thumbnail")]


def _files(line: Mapping[str, Any] | None) -> Sequence[object]:
    return [] if line is None else _list(line.get("files"))


def _urls(names: Sequence[object], room: PictureRoom) -> tuple[str, ...]:
    return tuple(url for name in names if (url := room.url(name)) is not None)


def _has_pictures(row: SheetRow) -> bool:
    return any(cell is not None and cell.pictures for cell in row.cells)


def _list(value: object) -> Sequence[Any]:
    return value if isinstance(value, list) else []
