"""Watch for skipped steps: log their rows, and end a run that no longer trains anything."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from mindspeed_mm.data.loading.providers import RunData
from mindspeed_mm.utils.errors import TrainingError
from mindspeed_mm.utils.launch import is_first_rank
from mindspeed_mm.utils.log import logger

_NAMED = 8  # rows with their file
_LISTED = 256  # rows by number
_WHY = {
    "not finite": "its loss or gradient is not finite",
    "no targets": "its global batch held nothing to train on",
}


class StepOutcome(Protocol):
    """The outcome of a step."""

    @property
    def skip_reason(self) -> str:
        """Why the step was skipped: "not finite" (loss or gradient) or "no targets"; "": it wasn't."""

    @property
    def loss(self) -> float:
        """Global loss of the step."""

    @property
    def loss_scale(self) -> float:
        """Loss scale of the step."""


class SkipWatch:
    """Checks the outcome of each step one step late, as the device may still compute it; the same on all ranks.

    Overflows while a dynamic loss scale is decreasing are part of the search for it: neither counted nor logged.

    Attributes:
        last_trained: the last checked step that wasn't skipped; at first the iteration where the run starts.
    """

    def __init__(
        self,
        iteration: int,
        *,
        limit: int,
        gather: Callable[[Any], list[Any]],
        data: RunData,
        last_good: Callable[[], str],
        row_rank: bool = True,
        smallest_scale: float | None = None,
    ) -> None:
        """
        Args:
            iteration: iteration after which the run continues.
            limit: number of skipped steps in a row that ends the run; 0: no limit.
            data: the data, for the names of rows and the reasons of faults.
            gather: (value) → the values of all ranks; called for skipped steps only.
            last_good: returns a clause that names the last good checkpoint.
            row_rank: whether this rank contributes rows; others read the same ones.
            smallest_scale: smallest dynamic loss scale; None: it isn't dynamic.
        """
        self.last_trained = iteration
        self._limit, self._gather, self._data, self._last_good = limit, gather, data, last_good
        self._row_rank, self._smallest_scale = row_rank, smallest_scale
        self._waiting: tuple[int, Callable[[], StepOutcome], list[int] | None] | None = None
        self._in_a_row, self._without_targets = 0, 0
        self._has_trained = iteration > 0

    def add(self, iteration: int, outcome: Callable[[], StepOutcome], row_ids: list[int] | None) -> None:
        """Check the step before, and store this one.

        Args:
            outcome: returns the outcome of this step; called with the next one.
            row_ids: numbers of this rank's rows; None: unknown.

        Raises:
            TrainingError: on all ranks: the limit of skipped steps in a row is reached.
        """
        self.look()
        self._waiting = iteration, outcome, row_ids

    def look(self) -> None:
        """Check the last step too, waiting for it (before a save, and at the end).

        Raises:
            TrainingError: see `add`.
        """
        if self._waiting is None:
            return
        (iteration, outcome, row_ids), self._waiting = self._waiting, None
        step = outcome()
        if not step.skip_reason:
            self.last_trained, self._has_trained = iteration, True
            self._in_a_row = self._without_targets = 0
        elif not self._is_search(step):
            self._in_a_row += 1
            self._without_targets = self._without_targets + 1 if step.skip_reason == "no targets" else 0
            self._report(iteration, step, row_ids)

    def finish(self) -> None:
        """Check the run at its end.

        Raises:
            TrainingError: every step of the run was skipped.
        """
        last = self._waiting
        self.look()
        if self._has_trained or not self._in_a_row or last is None:
            return
        if self._without_targets == self._in_a_row:
            raise TrainingError(f"nothing was trained: {self._nothing_usable(self._without_targets)}")
        iteration, outcome, row_ids = last
        why, rows = _WHY[outcome().skip_reason], self._rows_of(self._gather(row_ids if self._row_rank else None))
        raise TrainingError(f"nothing was trained: every step was skipped, the last, {iteration}, as {why}; {rows}")

    def _is_search(self, step: StepOutcome) -> bool:
        smallest = self._smallest_scale
        is_overflow = step.skip_reason == "not finite" and math.isfinite(step.loss)
        return is_overflow and smallest is not None and step.loss_scale > smallest

    def _report(self, iteration: int, step: StepOutcome, row_ids: list[int] | None) -> None:
        """Log the first skipped step in a row, and whenever their number has doubled; end the run at the limit."""
        number, epoch = self._in_a_row, self._data.global_batches_per_epoch
        is_last = 0 < self._limit <= number
        is_whole_epoch = epoch is not None and self._without_targets >= math.ceil(epoch)
        if not is_last and not is_whole_epoch and number & (number - 1):
            return
        if is_whole_epoch:
            raise TrainingError(f"nothing can be trained: {self._nothing_usable(self._without_targets)}")
        rows = self._rows_of(self._gather(row_ids if self._row_rank else None))
        if is_last:
            reasons = f"; {self._nothing_usable(number)}" if self._without_targets == number else ""
            raise TrainingError(
                f"{number} steps in a row were skipped (--max-skipped-steps {self._limit}), the last, {iteration}, as "
                f"{_WHY[step.skip_reason]}; {rows}{reasons}. Nothing has changed since iteration {self.last_trained}; "
                f"no checkpoint is written, so that good ones stay; {self._last_good()}"
            )
        if is_first_rank():
            series = f", the {number}th in a row" if number > 1 else ""
            logger.warning(f"step {iteration} was skipped{series}: {_WHY[step.skip_reason]}; {rows}")

    def _rows_of(self, gathered: list[list[int] | None]) -> str:
        by_rank = [rows for rows in gathered if rows is not None]
        if not by_rank:
            return "which rows it held is not known: the batches of this loader have no 'row_ids'"
        every = [row for rows in by_rank for row in rows]
        if not every:
            return "it held no row that could be used"
        listed, left = [], _LISTED
        for rank, rows in enumerate(by_rank):
            if rows and left > 0:
                listed.append(f"{', '.join(map(str, rows[:left]))}" + (f" (rank {rank})" if len(by_rank) > 1 else ""))
            left -= len(rows)
        text = f"its rows: {'; '.join(listed)}"
        if left < 0:
            text += f" and {-left} more, which --log-row-ids writes down"
        if self._data.where is not None:
            text += f" ({', '.join(map(self._data.where, every[:_NAMED]))}{', …' if len(every) > _NAMED else ''})"
        return text

    def _nothing_usable(self, steps: int) -> str:
        faults: Counter[str] = Counter()
        for found in self._gather(dict(self._data.faults()) if self._row_rank else {}):
            faults.update(found)
        reasons = ", ".join(f"{count} × {reason}" for reason, count in faults.most_common())
        why = f"rows left out: {reasons}" if reasons else "its rows have no word of an assistant to train on"
        return f"no row of {steps} step{'s' if steps > 1 else ''} could be used ({why})"
