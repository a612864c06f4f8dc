"""Scores equal those of lmms-eval's own functions on 200 predictions each, kept in tests/fixtures."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.tasks.evaluation.benchmarks import all_benchmarks
from mindspeed_mm.tasks.evaluation.scores import SCORES, Score, Target

FIXTURE = Path(__file__).parents[2] / "fixtures" / "lmms_eval_scores.json"


@functools.cache
def kept() -> dict[str, Any]:
    """Predictions, references and scores of lmms-eval."""
    content: dict[str, Any] = json.loads(FIXTURE.read_text(encoding="utf-8"))
    return content


def score_of(name: str) -> Score:
    return all_benchmarks()[name].score if name in all_benchmarks() else SCORES[name]


@pytest.mark.parametrize("name", ["chartqa", "docvqa", "ai2d", "mmmu", "wer", "exact_match"])
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
