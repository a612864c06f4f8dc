"""examples/custom_model/run.sh, as a user runs it: a model of one's own trains, goes on, is exported and evaluated."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from mindspeed_mm.monitor.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose run folder is its own."""
    (tmp_path / "examples").mkdir()
    shutil.copytree(ROOT / "examples" / "custom_model", tmp_path / "examples" / "custom_model")
    shutil.copy(ROOT / "examples" / "env_config.sh", tmp_path / "examples")
    for name in ("scripts", "configs", "mindspeed_mm", "pretrain_transformers.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("iterations", "at_least"), [(12, 0.0), (300, 0.9)], ids=["short", "learnt"])
def test_the_example_runs_to_its_end(checkout: Path, iterations: int, at_least: float) -> None:
    folder = Path(sys.executable).parent
    environment = {**os.environ, "VIRTUAL_ENV": str(folder.parent), "OMP_NUM_THREADS": "1", "MM_DEVICE": "cpu"}
    environment["PATH"] = os.pathsep.join([str(folder), os.environ["PATH"]])
    environment |= {"TRAIN_ITERS": str(iterations), "PLUGIN_ITERS": "2", "AT_LEAST": str(at_least), "LOG_INTERVAL": "1"}
    command = ["bash", str(checkout / "examples" / "custom_model" / "run.sh")]
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]
    first, second, evaluation, plugin = re.split(r"^== .*\n", done.stdout, flags=re.MULTILINE)[1:]
    run, half = checkout / "runs" / "custom_model", iterations // 2

    assert f"saved checkpoint runs/custom_model/iter_{half:07d}" in first and "exported" not in first
    assert f"loaded runs/custom_model/iter_{half:07d}; continuing after iteration {half}" in second
    assert f"iter_{half:07d}" not in re.findall(r"saved checkpoint \S+", second)
    steps = [r["iteration"] for r in read_metrics(run / "metrics.jsonl") if "loss" in r]
    assert steps == list(range(1, iterations + 1))
    found = re.search(r"held-out accuracy ([0-9.]+) \(en [0-9.]+, de [0-9.]+, fr [0-9.]+\)", evaluation)
    assert found is not None and float(found[1]) >= at_least
    for part in (first, second, plugin):
        assert "Traceback" not in part and "did you mean" not in part

    assert 'sub_modules_to_wrap; taken for Olmo2ForCausalLM: ["model.layers.{*}"]' in plugin
    assert json.loads((run / "plugin/hf/config.json").read_text())["architectures"] == ["Olmo2ForCausalLM"]
    with safe_open(run / "plugin/hf/model.safetensors", "pt") as weights:
        assert "model.layers.1.mlp.up_proj.weight" in weights.keys()  # noqa: SIM118
