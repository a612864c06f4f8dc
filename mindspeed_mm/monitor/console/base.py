"""The console of a rank: a sink that may show more than records."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mindspeed_mm.monitor.records import EvaluationRecord, StepRecord


class Console:
    """Shows nothing, as on all ranks but one; others override what they show."""

    def begin(self, header: Callable[[], Sequence[str]]) -> None:
        """Show what is known of the run, before its first step.

        Args:
            header: returns lines about it.
        """

    def advance(self, iteration: int) -> None:
        """Note that a step has been launched; its figures may still be on the device."""

    def work(self, name: str | None) -> None:
        """Note what the run does instead of training; None: it trains again."""

    def is_overdue(self) -> bool:
        """Whether so much time has passed since something was shown that the running step should be logged."""
        return False

    def step(self, record: StepRecord) -> None:
        """Show a logged step."""

    def evaluation(self, record: EvaluationRecord) -> None:
        """Show an evaluation."""

    def close(self) -> None:
        """Leave a terminal as it was, whatever ends the run."""

    def finish(self, summary: Callable[[], Sequence[str]]) -> None:
        """Show what has become of the run, after `close`, at an end that is no error.

        Args:
            summary: returns lines about it.
        """
