"""Files of lines about iterations that stay small however long a run is, and that a resumed run continues."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_mm.utils.files import replace_file
from mindspeed_mm.utils.log import logger

SeriesLine = Mapping[str, Any]


class Series:
    """Lines with an `iteration`, of at most `limit` iterations, which are about evenly spread over the run.

    Attributes:
        limit: the most iterations.
    """

    def __init__(
        self,
        path: Path,
        *,
        iteration: int,
        limit: int = 200,
        keeps_last: bool = False,
        on_drop: Callable[[SeriesLine], None] = lambda _: None,
    ) -> None:
        """Open a file, without the lines after the iteration from which the run goes on.

        Args:
            iteration: that iteration; 0: a new run, which drops the lines of an attempt before it.
            keeps_last: whether the last iteration has its lines, however close to the one before it; the file is then
                written anew each time.
            on_drop: called with each line that is dropped.
        """
        self._path, self.limit, self._keeps_last, self._on_drop = path, limit, keeps_last, on_drop
        self._is_behind = False
        self._kept: dict[int, list[SeriesLine]] = {}  # in the order of iterations
        found = _read(path)
        for line in found:
            if line["iteration"] <= iteration:
                self._kept.setdefault(line["iteration"], []).append(line)
            else:
                on_drop(line)
        self._spacing = self._span / len(self._kept) if len(self._kept) > limit // 2 else 0.0
        if found:
            self._write()

    def add(self, iteration: int, lines: Sequence[SeriesLine]) -> None:
        """Add the lines of an iteration, or drop them if those before are close."""
        numbers = list(self._kept)
        if self._keeps_last and len(numbers) > 1 and numbers[-1] - numbers[-2] < self._spacing:
            self._drop(numbers.pop())
        elif not self.is_due(iteration):
            return
        whole = [{"iteration": iteration, **line} for line in lines]
        is_new = iteration not in self._kept
        self._kept.setdefault(iteration, []).extend(whole)
        if is_new and len(self._kept) > self.limit:
            self._thin()
            self._write()
        elif self._keeps_last:
            self._write()
        else:
            self._append(whole)

    def is_due(self, iteration: int) -> bool:
        """Whether lines of an iteration would be kept."""
        return self._keeps_last or iteration - next(reversed(self._kept), -self._spacing) >= self._spacing

    @property
    def _span(self) -> int:
        return max(self._kept, default=0) - min(self._kept, default=0)

    def _thin(self) -> None:
        self._spacing = 2 * self._span / self.limit
        numbers = list(self._kept)
        last = numbers[0]
        for number in numbers[1 : -1 if self._keeps_last else None]:
            if number - last < self._spacing:
                self._drop(number)
            else:
                last = number

    def _drop(self, iteration: int) -> None:
        for line in self._kept.pop(iteration):
            self._on_drop(line)

    def _write(self) -> None:
        text = "".join(_as_text(line) for lines in self._kept.values() for line in lines)
        self._try(lambda: replace_file(self._path, text))

    def _append(self, lines: Sequence[SeriesLine]) -> None:
        def append() -> None:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write("".join(map(_as_text, lines)))

        self._try(append)

    def _try(self, write: Callable[[], None]) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write()
            self._is_behind = False
        except OSError as error:
            if not self._is_behind:
                logger.error(f"'{self._path}' can't be written ({error}); training goes on, and the report lacks it")
            self._is_behind = True


def _as_text(line: SeriesLine) -> str:
    return json.dumps(line, ensure_ascii=False) + "\n"


def _read(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file; none if it isn't there. A line that a kill tore is left out."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return []
    found = []
    for line in text.splitlines():
        try:
            content = json.loads(line)
        except ValueError:
            continue
        if isinstance(content, dict) and isinstance(content.get("iteration"), int):
            found.append(content)
    return found
