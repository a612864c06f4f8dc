"""ChartQA: questions about charts, answered with a number or a word. Source: https://arxiv.org/abs/2203.10244."""

from __future__ import annotations

from mindspeed_mm.tasks.evaluation.benchmark import (
    Benchmark,
    BenchmarkLayout,
    Pictures,
    Question,
    Row,
    categories,
    texts_in,
)
from mindspeed_mm.tasks.evaluation.scores import SCORES, Target


def _ask(row: Row, pictures: Pictures, question: str, answer: str, split: str) -> Question:
    # the instruction of lmms-eval's chartqa.yaml
    text = f"{row[question]}\nAnswer the question with a single word."
    return Question((*pictures(), text), Target(texts_in(row[answer])), categories=categories(row, split=split))


BENCHMARK = Benchmark(
    name="chartqa",
    split="test",
    layouts=(
        BenchmarkLayout(
            "tsv of VLMEvalKit, parquet of lmms-lab",
            ("image", "question", "answer"),
            lambda row, pictures: _ask(row, pictures, "question", "answer", "split" if "split" in row else "type"),
        ),
        BenchmarkLayout(
            "parquet of HuggingFaceM4",
            ("image", "query", "label"),
            lambda row, pictures: _ask(row, pictures, "query", "label", "human_or_machine"),
        ),
        BenchmarkLayout(
            "json of its authors",
            ("imgname", "query", "label"),
            lambda row, pictures: _ask(row, pictures, "query", "label", "split"),
            picture="imgname",
            folders=("png", "../png", ""),
            splits=("human", "augmented"),
        ),
    ),
    score=SCORES["relaxed_accuracy"],
    max_new_tokens=16,
    aliases=("chartqa_test",),
)
