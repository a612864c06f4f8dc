"""best.json of a run folder: the checkpoint whose evaluation had the best value of --save-best's figure so far."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path

from mindspeed_mm.configs.eval_metrics import EVAL_METRICS, MetricName, improves
from mindspeed_mm.utils.errors import CheckpointError
from mindspeed_mm.utils.files import write_json

BEST = "best.json"
_EXPECTED = (
    f"expected iteration (a whole number), metric (one of {', '.join(EVAL_METRICS)}) and value (a finite number); "
    "--ckpt-step N names a checkpoint without it"
)


@dataclass(frozen=True)
class BestCheckpoint:
    """The content of best.json.

    Attributes:
        iteration: of the checkpoint, and of the evaluation.
        metric: name of the figure (`configs.eval_metrics`).
        value: of the figure; finite.
    """

    iteration: int
    metric: MetricName
    value: float

    def beats(self, other: BestCheckpoint | None) -> bool:
        """Whether the value is better than another one; one of another figure doesn't count."""
        before = other.value if other is not None and other.metric == self.metric else None
        return improves(self.metric, self.value, before)


def read_best(root: Path) -> BestCheckpoint | None:
    """Return what best.json of a run folder says; None: there is none.

    Raises:
        CheckpointError: it can't be read.
    """
    file = root / BEST
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        iteration, metric, value = int(content["iteration"]), content["metric"], float(content["value"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"'{file}' can't be read ({type(error).__name__}: {error}); {_EXPECTED}") from error
    if iteration < 0 or metric not in EVAL_METRICS or not math.isfinite(value):
        raise CheckpointError(f"'{file}' has iteration {iteration}, metric {metric} and value {value}; {_EXPECTED}")
    return BestCheckpoint(iteration, metric, value)


def write_best(root: Path, best: BestCheckpoint) -> None:
    """Let best.json name a checkpoint, atomically."""
    write_json(root / BEST, dataclasses.asdict(best))
