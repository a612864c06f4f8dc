"""Scores of answers: for each row, for each category, and of all; as a table and as JSON."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_mm.tasks.evaluation.scores import RowScore, Score
from mindspeed_mm.utils.files import replace_file, write_json

if TYPE_CHECKING:
    from mindspeed_mm.tasks.evaluation.questions import EvaluatedRows

_GUESSES = 0  # seed of guesses: random.seed(0) is lmms-eval's


def score_rows(rows: EvaluatedRows, answers: Sequence[str | None], score: Score) -> list[dict[str, Any]]:
    """Score answers, in the order of the rows.

    Args:
        rows: what was asked.
        answers: for each row; None: it could not be answered, which counts as an empty answer.
        score: how they are scored.

    Returns:
        for each row index, id, prediction, references, categories, and the score as (sum, denominator).
    """
    guesses = random.Random(_GUESSES)
    scored = []
    for index, answer in enumerate(answers):
        question = rows.question(index)
        prediction = (answer or "").strip()  # as lmms-eval does before it scores
        line: dict[str, Any] = {"index": index}
        if question.id is not None:
            line["id"] = question.id
        line |= {"prediction": prediction, "references": list(question.target.references)}
        line["score"] = score.of_row(prediction, question.target, guesses)
        scored.append({**line, **({"categories": dict(question.categories)} if question.categories else {})})
    return scored


def report_of(scored: Sequence[dict[str, Any]], score: Score) -> dict[str, Any]:
    """Return the scores of all rows and of each category.

    Returns:
        `metric`, `language` if the score has one, `unit`, `higher_is_better`, `score` (null: there is nothing to
        divide by), `rows`, and with categories `categories`: kind → category → score and rows.
    """
    groups: dict[str, dict[str, list[RowScore]]] = defaultdict(lambda: defaultdict(list))
    for line in scored:
        for kind, category in line.get("categories", {}).items():
            groups[kind][category].append(line["score"])
    report: dict[str, Any] = {
        "metric": score.name,
        **({"language": score.language} if score.language else {}),
        "unit": score.unit,
        "higher_is_better": score.higher_is_better,
        "score": score.total([line["score"] for line in scored]),
        "rows": len(scored),
    }
    if groups:
        report["categories"] = {
            kind: {
                category: {"score": score.total(found), "rows": len(found)} for category, found in sorted(of.items())
            }
            for kind, of in groups.items()
        }
    return report


def table_of(report: dict[str, Any], name: str) -> str:
    """Return the report as a table, a line for each category and one for all rows.

    Args:
        name: of what was evaluated.
    """
    cells = [(name, report["metric"], "rows")]
    for kind, of in report.get("categories", {}).items():
        cells += [(f"{kind}: {category}", _shown(found["score"]), str(found["rows"])) for category, found in of.items()]
    cells.append(("all", _shown(report["score"]), str(report["rows"])))
    widths = [max(len(row[column]) for row in cells) for column in range(3)]
    return "\n".join(
        f"{first:<{widths[0]}}  {second:>{widths[1]}}  {third:>{widths[2]}}" for first, second, third in cells
    )


def remove_report(folder: Path) -> None:
    """Remove the scores of answers that are about to be replaced."""
    for name in ("results.json", "scores.jsonl"):
        (folder / name).unlink(missing_ok=True)


def write_report(folder: Path, report: dict[str, Any], scored: Sequence[dict[str, Any]]) -> None:
    """Write `results.json` and, with a line for each row, `scores.jsonl`; the second one first."""
    replace_file(folder / "scores.jsonl", "".join(f"{line}\n" for line in _lines(scored)))
    write_json(folder / "results.json", report)


def _lines(scored: Sequence[dict[str, Any]]) -> Iterator[str]:
    for line in scored:
        above, below = line["score"]
        shown = above if below == 1 else [above, below]
        yield json.dumps({**line, "score": shown}, ensure_ascii=False)


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
