"""Skipped steps: their rows are named once, twice, four times …; a run of nothing else is ended."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest

from mindspeed_mm.monitor.skips import SkipWatch
from mindspeed_mm.utils.errors import TrainingError


@dataclass
class Step:
    skip_reason: str = ""
    loss: float = 1.0
    loss_scale: float = 1.0


@dataclass
class Rows:
    faults_found: dict[str, int] = field(default_factory=dict)
    global_batches_per_epoch: float | None = None

    def where(self, row: int) -> str:
        return f"data.json, row {row}"

    def faults(self) -> dict[str, int]:
        return self.faults_found


NAN, EMPTY = Step("not finite", math.nan), Step("no targets", math.nan)


def watch(
    limit: int = 100, rows: Any = None, gathered: list[Any] | None = None, iteration: int = 8, **how: Any
) -> SkipWatch:
    def gather(value: Any) -> list[Any]:
        return [value] if gathered is None or not isinstance(value, list) else [value, *gathered]

    rows, clause = Rows() if rows is None else rows, "the last good checkpoint is 'run/iter_0000008'"
    return SkipWatch(iteration, limit=limit, gather=gather, data=rows, last_good=lambda: clause, **how)


def feed(skips: SkipWatch, *steps: Step, rows: list[int] | None = None, first: int = 9) -> None:
    for number, step in enumerate(steps, first):
        skips.add(number, lambda step=step: step, rows)  # type: ignore[misc]


def test_the_rows_of_a_skipped_step_are_named(said: list[str]) -> None:
    """L07"""
    skips = watch(gathered=[[5, 2], None])
    feed(skips, Step(), NAN, Step(), rows=[7])
    skips.look()
    assert said == [
        "step 10 was skipped: its loss or gradient is not finite; its rows: 7 (rank 0); 5, 2 (rank 1) "
        "(data.json, row 7, data.json, row 5, data.json, row 2)"
    ]
    assert skips.last_trained == 11


def test_rows_that_are_not_known_or_too_many(said: list[str]) -> None:
    skips = watch()
    feed(skips, NAN, Step(), rows=None)
    assert "which rows it held is not known" in said[0]
    feed(skips, NAN, Step(), rows=list(range(300)))
    assert "255 and 44 more, which --log-row-ids writes down (data.json, row 0" in said[1]
    assert said[1].endswith("row 7, …)")


def test_a_series_is_told_when_it_has_doubled(said: list[str]) -> None:
    feed(watch(), *[NAN] * 20, rows=[1])
    assert [sentence.split(" was")[0] for sentence in said] == [f"step {n}" for n in (9, 10, 12, 16, 24)]


def test_too_many_in_a_row_end_the_run() -> None:
    with pytest.raises(TrainingError) as caught:
        feed(watch(limit=3), NAN, NAN, Step(), NAN, NAN, NAN, NAN, rows=[3])
    assert str(caught.value) == (
        "3 steps in a row were skipped (--max-skipped-steps 3), the last, 14, as its loss or gradient is not finite; "
        "its rows: 3 (data.json, row 3). Nothing has changed since iteration 11; no checkpoint is written, so that "
        "good ones stay; the last good checkpoint is 'run/iter_0000008'"
    )
    feed(watch(limit=0), *[NAN] * 300, rows=[3])


def test_a_loss_scale_that_is_looked_for_is_no_failure(said: list[str]) -> None:
    skips = watch(limit=2, smallest_scale=1.0)
    feed(skips, *[Step("not finite", 2.0, 2.0**scale) for scale in range(30, 0, -1)], Step(), rows=[1])
    assert said == []
    feed(skips, Step("not finite", math.nan, 8.0), Step(), rows=[1])
    assert len(said) == 1  # no overflow: the loss itself
    with pytest.raises(TrainingError):  # as low as it goes, and it still overflows
        feed(skips, *[Step("not finite", 2.0, 1.0)] * 3, rows=[1])


def test_a_whole_epoch_without_targets_ends_the_run() -> None:
    """W04"""
    rows = Rows({"too short": 5, "not found": 1}, global_batches_per_epoch=2.5)
    with pytest.raises(TrainingError) as caught:
        feed(watch(rows=rows), Step(), EMPTY, EMPTY, Step(), EMPTY, EMPTY, EMPTY, Step(), rows=[])
    told = "nothing can be trained: no row of 3 steps could be used (rows left out: 5 × too short, 1 × not found)"
    assert str(caught.value) == told
    feed(watch(rows=rows), *[NAN] * 20)


def test_a_run_that_trained_nothing_has_failed() -> None:
    """W04"""
    skips = watch(iteration=0)
    feed(skips, EMPTY, EMPTY, rows=[1])
    with pytest.raises(TrainingError, match=r"nothing was trained: no row of 2 steps could be used \(its rows have no"):
        skips.finish()
    skips = watch(iteration=0)
    feed(skips, EMPTY, NAN, rows=[1])
    with pytest.raises(TrainingError, match="nothing was trained: every step was skipped, the last, 10, as its loss"):
        skips.finish()
    search = Step("not finite", 2.0, 4.0)
    for iteration, steps in ((0, [Step(), EMPTY]), (8, [EMPTY, NAN]), (0, []), (0, [search, search])):
        skips = watch(iteration=iteration, smallest_scale=1.0)
        feed(skips, *steps)
        skips.finish()
