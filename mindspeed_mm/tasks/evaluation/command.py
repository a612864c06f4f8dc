"""The command of evaluate_vlm.py: answer the rows of a benchmark, and score the answers."""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_mm.configs.vlm_evaluation import BenchmarkFlags
from mindspeed_mm.tasks.command_line import run_command
from mindspeed_mm.tasks.evaluation.describe import EvaluationRun, describe_evaluation
from mindspeed_mm.tasks.evaluation.report import remove_report, report_of, score_rows, table_of, write_report
from mindspeed_mm.tasks.inference.command import answer_outline
from mindspeed_mm.utils.launch import is_first_rank
from mindspeed_mm.utils.log import notice


def main(argv: Sequence[str] | None = None) -> int:
    """Run a launch command; see `run_command`."""
    return run_command(
        argv,
        BenchmarkFlags,
        "Evaluate a model on a benchmark, or on rows of your own (docs/evaluation.md).",
        lambda words: _outline(describe_evaluation(words, complete=False)),
        lambda words: evaluate_answers(describe_evaluation(words)),
    )


def _outline(run: EvaluationRun) -> dict[str, object]:
    return {**answer_outline(run.answers, run.rows), "benchmark": run.name, "metric": run.score.name}


def evaluate_answers(run: EvaluationRun) -> dict[str, object] | None:
    """Answer all rows of a launch, score the answers, and write and print the scores; a collective of its processes.

    Returns:
        what `results.json` has; None on other processes than the first.

    Raises:
        MMError: as `answer_into_file`.
    """
    from mindspeed_mm.tasks.inference.rows import answer_into_file

    if run.answers.overwrite and is_first_rank():
        remove_report(run.folder)
    lines = answer_into_file(run.answers, run.rows)
    if not is_first_rank():
        return None
    left_out = [line["index"] for line in lines if line["answer"] is None]
    if left_out:
        notice(f"{len(left_out)} rows could not be answered and count as empty answers: the first is row {left_out[0]}")
    scored = score_rows(run.rows, [line["answer"] for line in lines], run.score)
    report = {"benchmark": run.name, **report_of(scored, run.score)}
    write_report(run.folder, report, scored)
    print(table_of(report, run.name), flush=True)
    return report
