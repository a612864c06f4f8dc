"""`mindspeed-mm data check` of clips: buckets, and rows that would be left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mindspeed_mm.tools.cli import main
from tests.support.tiny_wan import model_json, write_clips, write_encoders


@pytest.fixture
def data_file(tmp_path: Path) -> Path:
    annotations = write_clips(tmp_path / "clips", rows=3, pictures=0, frames=9)
    (tmp_path / "clips" / "broken.mp4").write_bytes(b"no clip")
    lines = annotations.read_text().splitlines()
    more = [{"path": "broken.mp4", "cap": "a cat"}, {"path": "gone.mp4", "cap": "a dog"}]
    annotations.write_text("\n".join([json.dumps(more[0]), *lines, json.dumps(more[1])]) + "\n")
    param = {
        "dataset_type": "t2v",
        "basic_parameters": {"data_path": str(annotations), "data_folder": str(tmp_path / "clips")},
        "preprocess_parameters": {"buckets": [[5, 32, 32], [9, 32, 32], [13, 32, 32]]},
    }
    file = tmp_path / "data.json"
    file.write_text(json.dumps({"dataset_param": param}))
    return file


def test_buckets_and_faults(data_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = data_file.with_name("model.json")
    model.write_text(json.dumps(model_json(write_encoders(data_file.parent / "encoders"))))
    words = ["data", "check", str(data_file), "--mm-model", str(model), "--decode", "--num-workers", "0"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    report = json.loads(data_file.with_name("report.json").read_text())
    # clips of 9, 10 and 11 frames; a latent frame stands for 4, a token for 16 × 16 pixels
    assert report["buckets"] == {"9×32×32": {"samples": 3, "tokens": 3 * 4}}
    assert (report["rows"], report["samples"]) == (5, 3)
    assert sum(entry["rows"] for entry in report["left_out"].values()) == 2
    assert "broken.mp4" in printed and "gone.mp4" in printed and "9×32×32: 3 samples of 12 tokens" in printed


def test_the_status_says_whether_a_run_would_end(data_file: Path) -> None:
    content = json.loads(data_file.read_text())
    content["dataset_param"]["basic_parameters"]["on_bad_sample"] = "raise"
    data_file.write_text(json.dumps(content))
    assert main(["data", "check", str(data_file), "--num-workers", "0"]) == 1


def test_shapes_that_the_model_cannot_take(data_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = json.loads(data_file.read_text())
    content["dataset_param"]["preprocess_parameters"] = {"num_frames": 8, "max_height": 32, "max_width": 32}
    data_file.write_text(json.dumps(content))
    model = data_file.with_name("model.json")
    model.write_text(json.dumps(model_json(write_encoders(data_file.parent / "encoders"))))
    assert main(["data", "check", str(data_file), "--mm-model", str(model)]) == 1
    assert "num_frames is 8" in capsys.readouterr().err
