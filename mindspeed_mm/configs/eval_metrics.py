"""The figures of an evaluation by which --save-best and --early-stop judge a model: names, and which values are better.

A figure that `training.evaluate` returns may be chosen once it has its name and its entry here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

MetricName = Literal["loss"]


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
}

#: what --early-stop follows without --save-best
DEFAULT_METRIC: MetricName = "loss"

#: other names → names: those of metrics.jsonl and of the log line
METRIC_SYNONYMS = (("eval_loss", "loss"), ("validation loss", "loss"))


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
