"""Short ways of writing rows, and reading samples, in the tests of the data room."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any


def turn(role: str, content: Any, **extra: Any) -> dict[str, Any]:
    """One turn of a row."""
    return {"role": role, "content": content, **extra}


def talk(*contents: Any, system: str | None = None, **columns: Any) -> dict[str, Any]:
    """A row whose turns alternate between user and assistant."""
    turns = [turn("system", system)] if system is not None else []
    turns += [turn(("user", "assistant")[number % 2], content) for number, content in enumerate(contents)]
    return {"messages": turns, **columns}


def targets(sample: dict[str, Any], tokenizer: Any) -> str:
    """The text of the target tokens of a sample, with runs of them separated by '|'."""
    runs: list[list[int]] = [[]]
    for token in sample["labels"].tolist():
        if token == -100:
            runs.append([])
        else:
            runs[-1].append(token)
    return "|".join(tokenizer.decode(run) for run in runs if run)


def flat(lists: Iterable[list[Any]]) -> list[Any]:
    """One list of several."""
    return list(itertools.chain.from_iterable(lists))
