"""What a benchmark is: the layouts in which it is published, how its rows are asked, and how answers are scored."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_mm.data.conversation.messages import MessagePart, RowFault
from mindspeed_mm.data.media.media import MediaRef
from mindspeed_mm.tasks.evaluation.choices import letters_of
from mindspeed_mm.tasks.evaluation.scores import Score, Target

#: a row as it is in its file
Row = Mapping[str, Any]
#: returns the pictures of a row, in the order of its columns
Pictures = Callable[[], list[MediaRef]]


@dataclass(frozen=True)
class Question:
    """A row of a benchmark, ready to be asked.

    Attributes:
        parts: pictures and texts of the user's turn, in order.
        target: what the answer is compared with.
        id: the row's own name for itself; None: it has none.
        categories: kind of category (subject, split) → the row's; scores are also given for each.
    """

    parts: tuple[MessagePart, ...]
    target: Target
    id: object = None
    categories: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class BenchmarkLayout:
    """A layout in which a benchmark is published.

    Attributes:
        name: for messages.
        columns: those that its rows must have.
        ask: row and pictures → the question; raises RowFault of a faulty row.
        picture: column of the picture, of rows that have no columns image_1, image_2, …
        folders: where pictures that a row names are, relative to the folder of its file.
        splits: words of which each file's name has one: the `split` of its rows.
    """

    name: str
    columns: tuple[str, ...]
    ask: Callable[[Row, Pictures], Question]
    picture: str = "image"
    folders: tuple[str, ...] = ("",)
    splits: tuple[str, ...] = ()


@dataclass(frozen=True)
class Benchmark:
    """A benchmark.

    Attributes:
        name: its name, which is that of its module.
        split: of the rows that are evaluated; in a folder, files whose names begin with it are read.
        layouts: those in which it is published; the first one whose columns rows have is theirs.
        score: of its answers.
        max_new_tokens: longest answer in tokens, unless the launch states another length.
        aliases: names by which published files call it.
        parted: its folder has a folder for each subject.
        files_in: folder → its data files, where a layout names them in another way than by the split; none: it is no
            such folder. Raises DataError if something else of the layout is missing.
        rows_in: a file's only object, and the file's path → name and list of the rows that the object holds; None: it
            is a row itself.
    """

    name: str
    split: str
    layouts: tuple[BenchmarkLayout, ...]
    score: Score
    max_new_tokens: int
    aliases: tuple[str, ...] = ()
    parted: bool = False
    files_in: Callable[[Path], Sequence[Path]] = lambda folder: ()
    rows_in: Callable[[Row, Path], tuple[str, list[Any]] | None] = lambda row, path: None


def with_options(question: str, options: tuple[str, ...]) -> str:
    """Return a question with its options below it: `A. first`, and so on, a line each."""
    lines = [f"{letter}. {text}" for letter, text in zip(letters_of(options), options, strict=True)]
    return "\n".join([question, *lines])


def columns_of_options(row: Row) -> tuple[str, ...]:
    """Return the options of a row that has a column for each: A, B, …, as far as they are filled."""
    options: list[str] = []
    while (text := row.get(chr(ord("A") + len(options)))) not in (None, ""):
        options.append(str(text))
    return tuple(options)


def letter_of(answer: str, options: tuple[str, ...]) -> str:
    """Return an answer that is the letter of an option.

    Raises:
        RowFault: it is none.
    """
    if answer not in letters_of(options):
        raise RowFault(
            f"'answer' is '{answer}'; expected the letter of one of its {len(options)} options", "no such option"
        )
    return answer


def texts_in(value: object) -> tuple[str, ...]:
    """Return one or several texts: a list, a list that is written as a text ("['a', 'b']"), or a single text."""
    if isinstance(value, str) and value.startswith("[") and value.endswith("]"):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            return (str(value),)
    return tuple(str(item) for item in value) if isinstance(value, (list, tuple)) else (str(value),)


def categories(row: Row, **columns: str) -> dict[str, str]:
    """Return the categories of a row: kind → what the row's column says, of the columns that are filled."""
    return {kind: str(row[column]) for kind, column in columns.items() if row.get(column) not in (None, "")}
