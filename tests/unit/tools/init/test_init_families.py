"""`mindspeed-mm init` on a directory of each family, with rows of all its media: the run that it writes is accepted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mindspeed_mm.dry_run import dry_run
from mindspeed_mm.tasks.train.language import TRANSFORMERS
from mindspeed_mm.tools.cli import main
from tests.support.families import families
from tests.support.family_case import write_rows

QUICK = ("llava", "whisper")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.full) for n in families()])
def test_each_family(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    family = families()[name]
    family.make(tmp_path / "model")
    data = write_rows(tmp_path / "data", family).relative_to(tmp_path)
    words = ["init", "--model", "model", "--data", str(data), "--media", "data", "--output", "run"]
    assert main(words) == 0, capsys.readouterr().err
    capsys.readouterr()
    assert dry_run(TRANSFORMERS, ["run/run.yaml", "--dry-run"]) == 0
    answer = json.loads(capsys.readouterr().out)
    model = answer["model"]
    if family.kinds:  # an encoder; Whisper's is trained, but for its positions
        assert model["trained_parameters"] < model["parameters"]
    assert answer["steps_per_epoch"] == 8 and answer["units"]
