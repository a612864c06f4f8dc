"""AI2D: questions with options about diagrams of grade school science. Source: https://arxiv.org/abs/1603.07396."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from mindspeed_mm.data.conversation.messages import RowFault
from mindspeed_mm.data.media.media import MediaRef
from mindspeed_mm.tasks.evaluation.benchmark import (
    Benchmark,
    BenchmarkLayout,
    Pictures,
    Question,
    Row,
    categories,
    columns_of_options,
    letter_of,
    with_options,
)
from mindspeed_mm.tasks.evaluation.choices import letters_of
from mindspeed_mm.tasks.evaluation.labelled_diagrams import draw_letters
from mindspeed_mm.tasks.evaluation.scores import OPTION_LETTER, Target
from mindspeed_mm.utils.errors import DataError

# the instruction of lmms-eval's ai2d.yaml
_INSTRUCTION = "Answer with the option's letter from the given choices directly."
# what the authors' files have in the place of an option that a question hasn't
_NO_OPTION = "{}"


def _ask(row: Row, pictures: Pictures, options: tuple[str, ...], letter: str, name: str = "index") -> Question:
    text = f"{with_options(str(row['question']), options)}\n{_INSTRUCTION}"
    target = Target((letter_of(letter, options),), options)
    return Question((*pictures(), text), target, row.get(name), categories(row, category="category"))


def _ask_numbered(row: Row, pictures: Pictures) -> Question:
    options = tuple(map(str, row["options"]))
    return _ask(row, pictures, options, letters_of(options)[_number(row, "answer", options)])


def _number(row: Row, column: str, options: tuple[str, ...]) -> int:
    number = str(row[column])
    if not number.isdecimal() or int(number) >= len(options):
        raise RowFault(f"'{column}' is '{number}'; expected a number from 0 to {len(options) - 1}", "no such option")
    return int(number)


def _ask_of_authors(row: Row, pictures: Pictures) -> Question:
    """A question of the authors' files; about a diagram with letters if its options are such."""
    if not isinstance(row["answerTexts"], list):
        raise RowFault(f"'answerTexts' is {row['answerTexts']!r}; expected a list of options", "no options")
    options = tuple(map(str, row["answerTexts"]))
    right = _number(row, "correctAnswer", options)
    if options[right] == _NO_OPTION:
        raise RowFault(f"'correctAnswer' is {right}, whose text is '{_NO_OPTION}': none", "no such option")
    given = tuple(option for option in options if option != _NO_OPTION)
    letter = letters_of(given)[right - options[:right].count(_NO_OPTION)]
    if row.get("abcLabel"):
        folder, name = Path(row["folder"]), str(row["imageName"])
        drawn = draw_letters(folder / "images" / name, folder / "annotations" / f"{name}.json")
        return _ask(row, lambda: [MediaRef("image", content=drawn)], given, letter, "questionId")
    return _ask(row, pictures, given, letter, "questionId")


def _files_in(folder: Path) -> list[Path]:
    """The authors' files of questions about the images of the split test; some images have none."""
    questions, split = folder / "questions", folder / "ai2d_test_ids.csv"
    if not questions.is_dir():
        return []
    if not split.is_file():
        raise DataError(
            f"{split}: not found; expected the file of AI2D's authors with the numbers of the test split's images, one "
            "a line, beside the folder 'questions'"
        )
    numbers = [line.strip().removesuffix(".png") for line in split.read_text(encoding="utf-8").splitlines()]
    files = [questions / f"{number}.png.json" for number in numbers if number]
    found = [file for file in files if file.is_file() and not _has_none(file)]
    if not found:
        raise DataError(f"{split}: none of its {len(files)} images has questions in {questions}")
    return found


def _has_none(file: Path) -> bool:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:  # its rows are read again, with a message
        return False
    return isinstance(content, dict) and content.get("questions") == {}


def _rows_in(found: Row, path: Path) -> tuple[str, list[Any]] | None:
    """The questions of an authors' file, each with its image and the image's category."""
    if "imageName" not in found or "questions" not in found:
        return None
    questions, folder = found["questions"], path.absolute().parent.parent
    if not isinstance(questions, dict):
        return "questions", [questions]
    shared = {"imageName": found["imageName"], "folder": str(folder)}
    if (category := _categories(folder / "categories.json").get(str(found["imageName"]))) is not None:
        shared["category"] = category
    return "questions", [
        {**of, **shared, "question": text} if isinstance(of, dict) else of for text, of in questions.items()
    ]


@functools.cache
def _categories(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{file}: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise DataError(f"{file}: expected an object, image → category; found {type(content).__name__}")
    return content


BENCHMARK = Benchmark(
    name="ai2d",
    split="test",
    layouts=(
        BenchmarkLayout(
            "folder of its authors",
            ("imageName", "question", "answerTexts", "correctAnswer"),
            _ask_of_authors,
            picture="imageName",
            folders=("../images",),
        ),
        BenchmarkLayout("parquet of lmms-lab", ("image", "question", "options", "answer"), _ask_numbered),
        BenchmarkLayout(
            "tsv of VLMEvalKit",
            ("image", "question", "A", "B", "answer"),
            lambda row, pictures: _ask(row, pictures, columns_of_options(row), str(row["answer"])),
        ),
    ),
    score=OPTION_LETTER,
    max_new_tokens=16,
    aliases=("ai2d_test",),
    files_in=_files_in,
    rows_in=_rows_in,
)
