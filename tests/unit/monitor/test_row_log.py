"""Which rows a step trained on is in the file when the step has ended, and stays right over resumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.monitor.row_log import RowLog
from mindspeed_mm.utils import log


def read(folder: Path, name: str = "rank0.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rows" / name).read_text().splitlines()]


def write(folder: Path, rank: int, ranks: int, iteration: int, steps: range) -> None:
    rows = RowLog(folder, rank, ranks, iteration)
    for step in steps:
        rows.write(step, [10 * step + rank])
        assert read(folder, f"rank{rank}.jsonl")[-1] == {"iteration": step, "rows": [10 * step + rank]}
    rows.close()


def test_a_resumed_run_takes_away_what_lies_behind_its_checkpoint(tmp_path: Path) -> None:
    for rank in range(3):
        write(tmp_path, rank, 3, 0, range(1, 5))
    (tmp_path / "rows" / "rank0.jsonl").open("a").write('{"iteration": 5, "ro')  # torn by a kill
    write(tmp_path, 0, 2, 2, range(3, 4))
    assert [line["iteration"] for line in read(tmp_path)] == [1, 2, 3]
    assert len(read(tmp_path, "rank1.jsonl")) == 4  # rank 1 looks after it
    assert [line["iteration"] for line in read(tmp_path, "rank2.jsonl")] == [1, 2]  # a rank that is no more


def test_a_new_run_keeps_the_one_before(tmp_path: Path) -> None:
    write(tmp_path, 0, 1, 0, range(1, 3))
    write(tmp_path, 0, 1, 0, range(1, 2))
    assert len(read(tmp_path)) == 1
    assert len(read(tmp_path, "rank0.1.jsonl")) == 2


def test_a_loader_that_does_not_say_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(log.logger, "warning", said.append)
    rows = RowLog(tmp_path, 0, 1, 0)
    rows.write(1, None)
    rows.write(2, [])
    rows.close()
    assert [line["rows"] for line in read(tmp_path)] == [[], []]
    assert len(said) == 1 and "row_ids" in said[0]
