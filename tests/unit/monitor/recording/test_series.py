"""Files of a run's report stay small, evenly spread, and of one run, however often it is resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindspeed_mm.configs.recipe import DrawnSample
from mindspeed_mm.data.loading.counting import BatchCounts, RankCounts
from mindspeed_mm.monitor.recording.drawn_sheets import DrawnSheets
from mindspeed_mm.monitor.recording.expert_shares import ExpertShares
from mindspeed_mm.monitor.recording.lengths import LengthCounts
from mindspeed_mm.monitor.recording.rank_counts import RankFigures
from mindspeed_mm.monitor.recording.series import Series


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def iterations(path: Path) -> list[int]:
    return [line["iteration"] for line in lines_of(path)]


@pytest.mark.parametrize("keeps_last", [False, True])
def test_a_long_series_keeps_few_lines_evenly_spread(keeps_last: bool, tmp_path: Path) -> None:
    path, dropped = tmp_path / "report" / "series.jsonl", []
    series = Series(path, iteration=0, limit=20, keeps_last=keeps_last, on_drop=lambda line: dropped.append(line))
    for iteration in range(1, 401):
        series.add(iteration, [{"value": iteration * 2}])
        if iteration == 200:  # a kill, and a checkpoint some steps before
            path.open("a").write('{"iteration": 201, "val')
            series = Series(path, iteration=190, limit=20, keeps_last=keeps_last, on_drop=dropped.append)
            assert max(iterations(path)) <= 190
    found = iterations(path)
    assert found[0] == 1 and 8 <= len(found) <= 20 and found == sorted(set(found))
    gaps = np.diff(found[:-1] if keeps_last else found)
    assert gaps.max() <= 3 * gaps.min()
    assert found[-1] == 400 if keeps_last else found[-1] > 360
    assert all(line["value"] == line["iteration"] * 2 for line in lines_of(path))
    assert not {line["iteration"] for line in dropped if line["iteration"] < 190} & set(found)


def test_a_new_run_begins_anew_and_a_disk_that_is_full_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "series.jsonl"
    Series(path, iteration=0).add(5, [{}])
    series = Series(path, iteration=0)
    assert lines_of(path) == []

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("builtins.open", refuse)
        series.add(6, [{}])
    series.add(7, [{}])
    assert iterations(path) == [7]


def sample(index: int, content: bytes) -> DrawnSample:
    return DrawnSample(f"prompt {index}", index, 7, (1, 8, 8), {".jpg": content})


def test_pictures_go_with_their_lines(tmp_path: Path) -> None:
    sheets = DrawnSheets(tmp_path, 0)
    for iteration in range(1, 81):
        sheets.add(iteration, [sample(0, b"a"), sample(1, str(iteration).encode())])
    sheets = DrawnSheets(tmp_path, 70)
    lines = lines_of(tmp_path / "generated.jsonl")
    assert max(line["iteration"] for line in lines) <= 70 and len(lines) <= 2 * 60
    named = {name for line in lines for name in line["files"]}
    assert {f"generated/{path.name}" for path in (tmp_path / "generated").iterdir()} == named
    last = lines[-1]
    assert last["prompt"] == "prompt 1" and last["seed"] == 7 and last["size"] == [1, 8, 8] and last["video"] is None
    assert (tmp_path / last["files"][0]).read_bytes() == str(last["iteration"]).encode()


def test_lengths_are_counted_over_launches(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(1, 5000, 400)
    for number, part in enumerate(np.split(lengths, 2)):
        counts = LengthCounts(tmp_path, number, capacity=4096)
        for row in part:
            counts.add(BatchCounts(tokens=int(row), positions=5000, lengths=[int(row)]))
        counts.write(is_last=True)
    found = json.loads((tmp_path / "lengths.json").read_text())
    edges, expected = found["histogram"]["edges"], np.histogram(lengths, [*found["histogram"]["edges"]])[0]
    assert found["histogram"]["counts"] == expected.tolist() and edges[0] <= lengths.min() < lengths.max() < edges[-1]
    assert (found["rows"], found["longest"], found["capacity"], found["of"]) == (400, lengths.max(), 4096, "read")
    assert found["padding"] == pytest.approx(1 - lengths.sum() / (400 * 5000))


def test_lengths_that_are_known_before_are_those_of_all_data(tmp_path: Path) -> None:
    counts = LengthCounts(tmp_path, 0, capacity=None, known=np.array([10, 20, 30]))
    counts.add(BatchCounts(tokens=10, positions=10, lengths=[10]))
    counts.write()
    found = json.loads((tmp_path / "lengths.json").read_text())
    assert (found["of"], found["rows"], sum(found["histogram"]["counts"]), found["longest"]) == ("data", 3, 3, 30)


def test_of_many_ranks_the_extremes_are_listed(tmp_path: Path) -> None:
    figures = RankFigures(tmp_path, 0, processes=100)
    cost = [float((17 * rank) % 100) for rank in range(100)]
    for _ in range(2):
        figures.add(RankCounts([2 * value for value in cost], [3] * 100, [5] * 100))
    figures.write(4)
    (line,) = lines_of(tmp_path / "ranks.jsonl")
    assert len(line["ranks"]) == len(line["cost"]) == len(line["memory_ranks"]) == 64 and line["iteration"] == 4
    assert [2 * cost[rank] for rank in line["ranks"]] == line["cost"]
    assert {0.0, 198.0} <= set(line["cost"]) and 100.0 not in line["cost"]
    assert set(line["tokens"]) == {3.0}


def test_a_model_with_many_experts_has_fewer_lines_and_layers(tmp_path: Path) -> None:
    asked: list[int] = []
    shares = ExpertShares(tmp_path, 0)
    for iteration in range(1, 401):
        load = {f"layers.{layer}": [1 / 128] * 128 for layer in range(48)}
        shares.write(iteration, lambda load=load: asked.append(1) or load)
    lines = lines_of(tmp_path / "experts.jsonl")
    assert 10 <= len(lines) <= 26 and len(asked) < 100  # what isn't kept isn't read from the device
    assert list(lines[0]["layers"])[::11] == ["layers.0", "layers.47"] and len(lines[0]["layers"]) == 12
    assert (tmp_path / "experts.jsonl").stat().st_size < 500_000
    ExpertShares(tmp_path / "none", 0).write(1, dict)
    assert not (tmp_path / "none").exists()
