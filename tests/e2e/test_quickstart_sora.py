"""examples/quickstart_sora/run.sh, as a user runs it: digits and clips are learnt and sampled, a classifier reads."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from mindspeed_mm.monitor.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose run folder is its own."""
    (tmp_path / "examples").mkdir()
    shutil.copytree(ROOT / "examples" / "quickstart_sora", tmp_path / "examples" / "quickstart_sora")
    shutil.copy(ROOT / "examples" / "env_config.sh", tmp_path / "examples")
    for name in ("scripts", "configs", "mindspeed_mm", "pretrain_sora.py", "inference_sora.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("digits", "clips", "at_least"),
    [(10, 10, 0.0), (320, 400, 0.9)],
    ids=["short", "learnt"],
)
def test_the_example_runs_to_its_end(checkout: Path, digits: int, clips: int, at_least: float) -> None:
    folder = Path(sys.executable).parent
    environment = {**os.environ, "VIRTUAL_ENV": str(folder.parent), "OMP_NUM_THREADS": "1", "MM_DEVICE": "cpu"}
    environment["PATH"] = os.pathsep.join([str(folder), os.environ["PATH"]])
    environment |= {"TRAIN_ITERS": str(digits), "VIDEO_ITERS": str(clips), "AT_LEAST": str(at_least)}
    command = ["bash", str(checkout / "examples" / "quickstart_sora" / "run.sh")]
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "Traceback" not in done.stdout and "did you mean" not in done.stdout
    run = checkout / "runs" / "quickstart_sora"
    report = json.loads((run / "report.json").read_text())
    assert report["classifier_accuracy"] >= at_least and report["real_accuracy"] > 0.98 and report["samples"] == 100
    for name, iterations in (("images_run", digits), ("clips_run", clips)):
        steps = [record for record in read_metrics(run / name / "metrics.jsonl") if "loss" in record]
        assert steps[-1]["iteration"] == iterations
    assert len(list((run / "samples").glob("*.png"))) == 101 and len(list((run / "clip_samples").glob("*.mp4"))) == 8
    for sheet in (run / "samples" / "contact_sheet.png", run / "clip_samples" / "contact_sheet.png"):
        with Image.open(sheet) as opened:
            assert min(opened.size) > 300
