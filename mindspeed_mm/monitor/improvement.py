"""How the evaluations of a run have gone: the best one so far, and how many have come after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from mindspeed_mm.checkpoint.best import BestCheckpoint
from mindspeed_mm.configs.eval_metrics import DEFAULT_METRIC, MetricName, improves
from mindspeed_mm.configs.evaluation_rules import asking_flags_of
from mindspeed_mm.configs.run import Run
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.log import notice


@dataclass(frozen=True)
class Improvement:
    """The evaluations so far, by one figure; checkpoints hold it, so that a resumed run decides as the unbroken one.

    Attributes:
        metric: the figure.
        value: its best value; None: there was no finite one.
        iteration: after which it was found.
        since: number of evaluations since then, or since the start.
    """

    metric: MetricName = DEFAULT_METRIC
    value: float | None = None
    iteration: int | None = None
    since: int = 0

    @classmethod
    def of(cls, run: Run, saved: Mapping[str, Any] | None) -> Improvement | None:
        """Return what a run begins with; None: it follows no figure.

        Args:
            saved: `state` in the checkpoint that the run resumes from; None: there is none. It counts if it is about
                the same figure.
        """
        if run.checkpoint.save_best is None and run.length.early_stop is None:
            return None
        fresh = cls(run.checkpoint.save_best or DEFAULT_METRIC)
        if saved is None:
            return fresh
        if saved["metric"] != fresh.metric:
            notice(
                f"the best value so far begins anew: the checkpoint follows {saved['metric']}, and this run "
                f"{fresh.metric}"
            )
            return fresh
        value, iteration = saved["value"], saved["iteration"]
        return replace(fresh, value=value, iteration=iteration, since=int(saved["since"]))

    def after(self, iteration: int, figures: Mapping[MetricName, float]) -> Improvement:
        """Return the state after an evaluation.

        Args:
            figures: its figures, the same on all ranks.
        """
        value = figures[self.metric]
        if improves(self.metric, value, self.value):
            return replace(self, value=value, iteration=iteration, since=0)
        return replace(self, since=self.since + 1)

    def ends(self, early_stop: int | None, worse: int = 0) -> bool:
        """Whether --early-stop ends the run after `worse` further evaluations without improvement."""
        return early_stop is not None and self.since + worse >= early_stop

    @property
    def state(self) -> dict[str, Any]:
        """The attributes, as JSON values."""
        return asdict(self)

    @property
    def checkpoint(self) -> BestCheckpoint | None:
        """The best evaluation, as best.json has it."""
        if self.value is None or self.iteration is None:
            return None
        return BestCheckpoint(self.iteration, self.metric, self.value)


def refuse_without_validation(run: Run) -> None:
    """Raise for a run whose flags need evaluations, and whose data provider returned no validation data.

    Raises:
        ConfigError: it does.
    """
    asking = asking_flags_of(run)
    if asking:
        raise ConfigError(
            f"{asking[0]} needs validation data, and train_valid_test_datasets_provider returned none: the second of "
            "the three things that it returns is None; return a data set there, or leave the flag out"
        )
