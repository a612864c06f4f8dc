"""DocVQA: questions about scanned documents, with several right answers. Source: https://arxiv.org/abs/2007.00398."""

from __future__ import annotations

from mindspeed_mm.data.conversation.messages import RowFault
from mindspeed_mm.tasks.evaluation.benchmark import Benchmark, BenchmarkLayout, Pictures, Question, Row, texts_in
from mindspeed_mm.tasks.evaluation.scores import SCORES, Target


def _ask(row: Row, pictures: Pictures, answers: str, name: str) -> Question:
    if not row[answers]:
        raise RowFault(f"'{answers}' is {row[answers]!r}; the answers of the split test aren't public", "no answer")
    # the instruction of lmms-eval's docvqa.yaml
    text = f"{row['question']}\nAnswer the question using a single word or phrase."
    kinds = row.get("question_types")
    kind = {"question type": str(kinds[0])} if isinstance(kinds, list) and kinds else {}
    return Question((*pictures(), text), Target(texts_in(row[answers])), row.get(name), kind)


BENCHMARK = Benchmark(
    name="docvqa",
    split="val",
    layouts=(
        BenchmarkLayout(
            "parquet of lmms-lab, json of its authors",
            ("image", "question", "answers"),
            lambda row, pictures: _ask(row, pictures, "answers", "questionId"),
        ),
        BenchmarkLayout(
            "tsv of VLMEvalKit",
            ("image", "question", "answer"),
            lambda row, pictures: _ask(row, pictures, "answer", "index"),
        ),
    ),
    score=SCORES["anls"],
    max_new_tokens=32,
    aliases=("docvqa_val",),
    rows_in=lambda row, path: ("data", row["data"]) if isinstance(row.get("data"), list) else None,
)
