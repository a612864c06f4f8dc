"""metrics.jsonl: full precision, appended on resume, torn lines repaired, earlier runs kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mindspeed_mm.monitor import metrics
from mindspeed_mm.monitor.metrics import MetricsWriter, read_metrics, repair_last_line


def write(folder: Path, *records: dict, resumed: bool = False) -> None:
    writer = MetricsWriter(folder, resumed=resumed)
    for record in records:
        writer.write(record)
    writer.close()


def test_a_line_is_there_when_write_returns_at_full_precision(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, resumed=False)
    writer.write({"iteration": 1, "loss": 0.1 + 0.2, "bad": float("nan")})
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"iteration": 1, "loss": 0.30000000000000004, "bad": None}]


@pytest.mark.parametrize("torn", ['{"iteration": 3, "lo', '{"iteration": 3}', "\x00\x00\x00", '"text"\n', "\n\n"])
def test_resume_repairs_a_torn_last_line(tmp_path: Path, torn: str) -> None:
    write(tmp_path, {"iteration": 1}, {"iteration": 2})
    with open(tmp_path / "metrics.jsonl", "a") as f:
        f.write(torn)
    write(tmp_path, {"iteration": 3}, resumed=True)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [1, 2, 3]


def test_repair_of_an_empty_or_hopeless_file(tmp_path: Path) -> None:
    for content in ("", "garbage"):
        path = tmp_path / "m.jsonl"
        path.write_text(content)
        repair_last_line(path)
        assert path.read_text() == ""


def test_a_new_run_keeps_the_file_of_the_old_one(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        write(tmp_path, {"iteration": number})
    assert [
        read_metrics(tmp_path / f)[0]["iteration"] for f in ("metrics.1.jsonl", "metrics.2.jsonl", "metrics.jsonl")
    ] == [
        1,
        2,
        3,
    ]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no device that is always full")
def test_a_full_disk_does_not_end_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(metrics.logger, "error", said.append)
    writer = MetricsWriter(tmp_path, resumed=False)
    real, writer._file = writer._file, open("/dev/full", "a", buffering=1 << 20)  # noqa: SIM115
    writer.write({"iteration": 1})
    writer.write({"iteration": 2})
    assert len(said) == 1 and "No space left on device" in said[0] and "training goes on" in said[0]
    writer._file = real
    writer.write({"iteration": 3})
    writer.close()
    assert [r["iteration"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [3]
