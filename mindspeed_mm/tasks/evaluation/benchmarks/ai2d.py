"""AI2D: questions with options about diagrams of grade school science. Source: https://arxiv.org/abs/1603.07396."""

from __future__ import annotations

from mindspeed_mm.data.conversation.messages import RowFault
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
from mindspeed_mm.tasks.evaluation.scores import OPTION_LETTER, Target

# the instruction of lmms-eval's ai2d.yaml
_INSTRUCTION = "Answer with the option's letter from the given choices directly."


def _ask(row: Row, pictures: Pictures, options: tuple[str, ...], letter: str) -> Question:
    text = f"{with_options(str(row['question']), options)}\n{_INSTRUCTION}"
    target = Target((letter_of(letter, options),), options)
    return Question((*pictures(), text), target, row.get("index"), categories(row, category="category"))


def _ask_numbered(row: Row, pictures: Pictures) -> Question:
    options, number = tuple(map(str, row["options"])), str(row["answer"])
    if not number.isdecimal() or int(number) >= len(options):
        raise RowFault(f"'answer' is '{number}'; expected a number from 0 to {len(options) - 1}", "no such option")
    return _ask(row, pictures, options, letters_of(options)[int(number)])


BENCHMARK = Benchmark(
    name="ai2d",
    split="test",
    layouts=(
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
)
