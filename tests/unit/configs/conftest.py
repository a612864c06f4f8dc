"""What the tests of the configuration room share: a folder with the four files of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, holding model.json, data.json, tools.json and fsdp2.yaml, and an HF directory `hf`."""
    (tmp_path / "hf").mkdir()
    (tmp_path / "model.json").write_text(json.dumps({"init_from_hf_path": "./hf"}))
    data = {
        "dataset_param": {
            "dataset_type": "huggingface",
            "basic_parameters": {"dataset": "rows.json"},
            "preprocess_parameters": {"model_name_or_path": "./hf"},
        }
    }
    (tmp_path / "data.json").write_text(json.dumps(data))
    (tmp_path / "tools.json").write_text("{}")
    (tmp_path / "fsdp2.yaml").write_text("sharding_size: auto\n")
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path
