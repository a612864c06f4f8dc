"""The figures of an evaluation by which --save-best and --early-stop judge a model: names, and which values are better.

A figure that `training.evaluate` returns may be chosen once it has its name and its entry here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

#: scores of generated answers (`tasks/evaluation/scores.py`), which --eval-generate computes
AnswerScoreName = Literal["exact_match", "relaxed_accuracy", "anls", "multiple_choice", "wer"]
#: languages whose transcripts have rules of their own for wer (`tasks/evaluation/transcripts.py`)
TranscriptLanguage = Literal["en", "zh"]
MetricName = Literal["loss", "exact_match", "relaxed_accuracy", "anls", "multiple_choice", "wer"]


@dataclass(frozen=True)
class EvalMetric:
    """A figure of an evaluation.

    Attributes:
        title: its name in sentences.
        higher_is_better: whether the greater of two values is the better one.
    """

    title: str
    higher_is_better: bool


EVAL_METRICS: Mapping[MetricName, EvalMetric] = {
    "loss": EvalMetric("validation loss", higher_is_better=False),
    "exact_match": EvalMetric("share of exact answers", higher_is_better=True),
    "relaxed_accuracy": EvalMetric("relaxed accuracy of answers", higher_is_better=True),
    "anls": EvalMetric("ANLS of answers", higher_is_better=True),
    "multiple_choice": EvalMetric("share of right choices", higher_is_better=True),
    "wer": EvalMetric("word error rate of answers", higher_is_better=False),
}

#: what --early-stop follows without --save-best
DEFAULT_METRIC: MetricName = "loss"

#: other names → names: those of metrics.jsonl and of the log line
METRIC_SYNONYMS = (*((f"eval_{name}", name) for name in EVAL_METRICS), ("validation loss", "loss"))


def improves(metric: MetricName, value: float, best: float | None) -> bool:
    """Whether a value is better than the best one before it; a tie isn't, and NaN or an infinite value never is.

    Args:
        best: None: there is none yet.
    """
    if not math.isfinite(value):
        return False
    if best is None:
        return True
    return value > best if EVAL_METRICS[metric].higher_is_better else value < best
