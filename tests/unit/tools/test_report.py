"""`mindspeed-mm report`: which files it writes, and what it says of folders that are none of a run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mindspeed_mm.tools.cli import main
from tests.support.run_folders import write_run


def test_the_report_of_a_run_is_in_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run")
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"{run}/report.html\n"
    assert "<h1>run</h1>" in (run / "report.html").read_text() and (run / "loss.png").exists()


def test_another_file_gets_the_page_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, page = write_run(tmp_path / "run"), tmp_path / "page.html"
    assert main(["report", str(run), "--output", str(page)]) == 0
    assert page.exists() and not (run / "report.html").exists() and not (run / "loss.png").exists()


def test_runs_of_the_same_name_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --output a comparison is written where one stands."""
    monkeypatch.chdir(tmp_path)
    runs = [write_run(Path(name) / "run") for name in ("one", "other")]
    assert main(["report", *map(str, runs)]) == 0
    assert capsys.readouterr().out == "comparison.html\n"
    assert re.findall(r"</i>([^<]*)</h1>", (tmp_path / "comparison.html").read_text()) == ["one/run", "other/run"]


@pytest.mark.parametrize(
    ("folder", "said"),
    [
        ("absent", "'absent' is no folder; expected a run folder, the --save of a run"),
        (
            "runs",
            "'runs' has neither metrics.jsonl nor launch.json, so it is no run folder; of the folders in it, a, b are",
        ),
        ("empty", "'empty' has neither metrics.jsonl nor launch.json, so it is no run folder\n"),
    ],
)
def test_a_folder_of_no_run_is_refused(
    folder: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("runs/a", "runs/b"):
        write_run(Path(name))
    Path("empty").mkdir()
    assert main(["report", folder]) == 1
    assert said in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run")
    assert main(["report", str(run), "--output", str(tmp_path / "absent" / "page.html")]) == 1
    assert "absent/page.html' can't be written (No such file or directory)" in capsys.readouterr().err
