"""Scores equal those of lmms-eval's own functions on 200 predictions each, kept in tests/fixtures."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.tasks.evaluation.benchmarks import all_benchmarks
from mindspeed_mm.tasks.evaluation.report import report_of
from mindspeed_mm.tasks.evaluation.scores import SCORES, Score, Target, find_score

FIXTURES = Path(__file__).parents[2] / "fixtures"


@functools.cache
def kept() -> dict[str, Any]:
    """Predictions, references and scores of lmms-eval."""
    found: dict[str, Any] = {}
    for name in ("lmms_eval_scores.json", "lmms_eval_transcripts.json"):
        found |= json.loads((FIXTURES / name).read_text(encoding="utf-8"))
    return found


def score_of(name: str) -> Score:
    return all_benchmarks()[name].score if name in all_benchmarks() else find_score(*name.split())


@pytest.mark.parametrize("name", ["chartqa", "docvqa", "ai2d", "mmmu", "wer", "wer en", "wer zh", "exact_match"])
def test_scores_are_those_of_lmms_eval(name: str) -> None:
    """Row by row, and of all rows, in lmms-eval's units; guesses are drawn by the same seed."""
    case, score, guesses = kept()[name], score_of(name), random.Random(0)
    assert len(case["rows"]) == 200
    found = []
    for row in case["rows"]:
        target = Target(tuple(row["references"]), tuple(row.get("options", ())))
        found.append(score.of_row(row["prediction"], target, guesses))
        expected = row["score"] if row["score"] is None else pytest.approx(row["score"], rel=1e-12, abs=0)
        assert score.total(found[-1:]) == expected, row
    total = score.total(found)
    assert total is not None and 0 < total < score.scale
    assert (round(total, 5) if name == "mmmu" else total) == pytest.approx(case["all"], rel=1e-12)
    assert len({row["score"] for row in case["rows"]}) > 1


def test_nothing_to_divide_by() -> None:
    assert SCORES["wer"].total([SCORES["wer"].of_row("a", Target(("!",)), random.Random(0))]) is None


def test_subjects_and_domains_of_mmmu() -> None:
    """The scores of lmms-eval's own table; options that are written as a list are read from the text."""
    case, benchmark = kept()["mmmu"], all_benchmarks()["mmmu"]
    scored, guesses = [], random.Random(0)
    for row in case["rows"]:
        content = {**row, "question": "what", "options": repr(row["options"]), "answer": row["references"][0]}
        question = benchmark.layouts[0].ask(content, list)
        assert question.target == Target(tuple(row["references"]), tuple(row["options"]))
        score = benchmark.score.of_row(row["prediction"], question.target, guesses)
        scored.append({"score": score, "categories": question.categories})
    categories = report_of(scored, benchmark.score)["categories"]
    found = {**categories["subject"], **{f"Overall-{name}": of for name, of in categories["domain"].items()}}
    expected = {name: of for name, of in case["categories"].items() if name != "Overall" and of["num"]}
    assert len(expected) > 8 and found.keys() == expected.keys()
    for name, of in expected.items():
        assert (found[name]["rows"], round(found[name]["score"], 5)) == (of["num"], of["acc"]), name
