"""MMMU: questions of college exams in 30 subjects, most with options. Source: https://arxiv.org/abs/2311.16502."""

from __future__ import annotations

import re

from mindspeed_mm.data.conversation.messages import MessagePart, RowFault
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
    texts_in,
    with_options,
)
from mindspeed_mm.tasks.evaluation.scores import OPTION_OR_TEXT, Target

# the instructions of lmms-eval's mmmu_val.yaml
_CHOOSE = "Answer with the option's letter from the given choices directly."
_WRITE = "Answer the question using a single word or phrase."
_DOMAINS = {
    "Art and Design": "Art Art_Theory Design Music",
    "Business": "Accounting Economics Finance Manage Marketing",
    "Science": "Biology Chemistry Geography Math Physics",
    "Health and Medicine": "Basic_Medical_Science Clinical_Medicine Diagnostics_and_Laboratory_Medicine Pharmacy "
    "Public_Health",
    "Humanities and Social Science": "History Literature Sociology Psychology",
    "Tech and Engineering": "Agriculture Architecture_and_Engineering Computer_Science Electronics Energy_and_Power "
    "Materials Mechanical_Engineering",
}
_DOMAIN_OF = {subject: domain for domain, subjects in _DOMAINS.items() for subject in subjects.split()}
_IMAGE = re.compile(r"<image (\d+)>")


def _ask(row: Row, pictures: Pictures, options: tuple[str, ...], kinds: dict[str, str]) -> Question:
    question, answer = str(row["question"]), str(row["answer"])
    text = f"{with_options(question, options)}\n\n{_CHOOSE}" if options else f"{question}\n\n{_WRITE}"
    target = Target((letter_of(answer, options) if options else answer,), options)
    if "subject" in kinds:
        kinds = {"domain": _DOMAIN_OF.get(kinds["subject"].replace(" ", "_"), "other"), **kinds}
    return Question(_interleaved(text, pictures()), target, row.get("id", row.get("index")), kinds)


def _interleaved(text: str, pictures: list[MediaRef]) -> tuple[MessagePart, ...]:
    """The text with each picture where `<image N>` first stands; pictures that it doesn't name come before it."""
    parts: list[MessagePart] = []
    position, used = 0, set()
    for mark in _IMAGE.finditer(text):
        number = int(mark[1])
        if number > len(pictures):
            raise RowFault(f"the question names <image {number}>, and the row has {len(pictures)}", "no such picture")
        if number in used:
            continue
        used.add(number)
        parts += [text[position : mark.start()], pictures[number - 1]]
        position = mark.end()
    parts.append(text[position:])
    unnamed = [picture for number, picture in enumerate(pictures, start=1) if number not in used]
    return (*(unnamed if not used else ()), *(part for part in parts if part))


def _ask_parquet(row: Row, pictures: Pictures) -> Question:
    options = texts_in(row["options"]) if row["question_type"] == "multiple-choice" else ()
    subject = re.fullmatch(r"[^_]+_(.+?)_\d+", str(row["id"]))
    if subject is None:
        raise RowFault(f"'id' is '{row['id']}'; expected one such as validation_Accounting_1", "an unknown id")
    return _ask(row, pictures, options, {"subject": subject[1]})


BENCHMARK = Benchmark(
    name="mmmu",
    split="validation",
    layouts=(
        BenchmarkLayout(
            "parquet of its authors or of lmms-lab",
            ("id", "question", "options", "answer", "question_type", "image_1"),
            _ask_parquet,
        ),
        BenchmarkLayout(
            "tsv of VLMEvalKit",
            ("image", "question", "A", "answer"),
            lambda row, pictures: _ask(
                row, pictures, columns_of_options(row), categories(row, split="split", subject="category")
            ),
        ),
    ),
    score=OPTION_OR_TEXT,
    max_new_tokens=128,
    aliases=("mmmu_val", "mmmu_dev_val"),
    parted=True,
)
