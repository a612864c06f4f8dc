"""Two commands from a model's directory and rows to a trained model: `mindspeed-mm init` and `mindspeed-mm train`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mindspeed_mm.tools.cli import main
from mindspeed_mm.tools.train.target import find_target
from tests.support.launch import metrics_of, run_entry
from tests.support.workers import RankPool

SUMS = [(a, b) for a in range(6) for b in range(5)]


def sums_as_messages(folder: Path) -> Path:
    rows = [
        {"messages": [{"role": "user", "content": f"{a} + {b}"}, {"role": "assistant", "content": str(a + b)}]}
        for a, b in SUMS
    ]
    file = folder / "rows.json"
    file.write_text(json.dumps(rows))
    return file


#: name → writes 30 rows into a folder, and returns what --data names
ROWS: dict[str, Callable[[Path], Path]] = {"messages": sums_as_messages}


def start_as_train_does(folder: str, where: Path) -> None:
    """Run what `mindspeed-mm train FOLDER` starts, in this process."""
    os.chdir(where)
    module, file = find_target(folder, []).words[1:]
    run_entry([file], script=f"{module.rpartition('.')[2]}.py")


@pytest.mark.parametrize("form", ROWS)
def test_a_text_model_learns_rows(
    form: str, qwen3_dir: Path, ranks1: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = ROWS[form](tmp_path)
    assert main(["init", "--model", str(qwen3_dir), "--data", data.name, "--output", "run"]) == 0
    written = (tmp_path / "run" / "run.yaml").read_text()
    ranks1.run(start_as_train_does, "run", tmp_path, timeout=120)
    losses, _ = metrics_of(tmp_path / "run")
    assert losses[-1] < 0.6 * losses[0]
    assert (tmp_path / "run" / "hf" / "model.safetensors").is_file()
    assert (tmp_path / "run" / "run.yaml").read_text() == written
