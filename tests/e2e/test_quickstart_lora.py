"""LORA=1 of examples/quickstart: what its scripts launch trains, and PEFT, the run's model and the merged one agree."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

import pytest

from tests.e2e.test_examples import launched
from tests.support.launch import ROOT, run_entry
from tests.support.workers import RankPool

QUICKSTART = ROOT / "examples/quickstart"


def run_program(path: Path, *words: str) -> None:
    before = sys.argv
    sys.argv = [str(path), *words]
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        sys.argv = before


def run_in(folder: Path, words: list[str]) -> None:
    """Train with a folder as the working folder, which a script's paths are relative to."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        run_entry(words)
    finally:
        os.chdir(before)


def test_one_step_each(ranks2: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("examples", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    run_program(QUICKSTART / "prepare.py")
    answers = {
        row["messages"][1]["content"]
        for row in json.loads(Path("runs/quickstart/data/base.json").read_text())
        if row["images"]
    }
    assert answers == {"0", "1", "2", "3", "4"}
    monkeypatch.chdir(ROOT)
    for lora in ("base", "1"):
        found = launched("quickstart/finetune_quickstart.sh", tmp_path, LORA=lora, TRAIN_ITERS="1", NPUS_PER_NODE="2")
        assert found.entry == "pretrain_transformers.py"
        ranks2.run(run_in, tmp_path, [*found.words, "--num-workers", "0"], timeout=120)
    monkeypatch.chdir(tmp_path)
    for run in ("runs/quickstart_base", "runs/quickstart_lora"):
        Path(run, "report.json").write_text('{"heldout_accuracy": 0.5}')
    run_program(
        QUICKSTART / "check_lora.py",
        *("--run", "runs/quickstart_lora", "--base", "runs/quickstart_base", "--data", "runs/quickstart/data"),
    )
    report = json.loads(Path("runs/quickstart_lora/report.json").read_text())
    assert report["heldout_accuracy_before"] == 0.5 and 0.01 < report["trained_share"] < 0.05
