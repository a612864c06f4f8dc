"""`mindspeed-mm data check`: what it says about rows is what a run would read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mindspeed_mm.data import build_mm_dataset
from mindspeed_mm.tools.cli import main
from tests.support.tiny import tiny_qwen2_5_vl_dir
from tests.unit.data.data_rows import talk


@pytest.fixture
def data_json(tmp_path: Path) -> Path:
    """A data.json over 24 rows: text and images, one row with a damaged image, one mismatch, one too long."""
    model = tiny_qwen2_5_vl_dir(tmp_path / "model", weights=False)
    Image.new("RGB", (56, 56), "red").save(tmp_path / "a.png")
    content = (tmp_path / "a.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(content[: len(content) - 40])
    rows = [talk("which digit", "seven " * (1 + index)) for index in range(20)]
    rows += [
        talk("<image> and <image>", "two", images=["a.png", "a.png"]),
        talk("<image>", "cut", images=["cut.png"]),
        talk("<image>", "no image", images=["a.png", "a.png"]),
        talk("question " * 200, "long"),
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    names = {"messages": "messages", "role_tag": "role", "content_tag": "content", "user_tag": "user"}
    config = {
        "dataset_param": {
            "dataset_type": "huggingface",
            "basic_parameters": {"dataset_dir": str(tmp_path), "dataset": "rows.json", "cutoff_len": 128},
            "preprocess_parameters": {"model_name_or_path": str(model)},
            "attr": {**names, "assistant_tag": "assistant", "images": "images"},
        }
    }
    path = tmp_path / "data.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def check(data_json: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, report and what was printed."""
    status = main(["data", "check", str(data_json), "--num-workers", "0", *flags])
    report = json.loads((data_json.parent / "report.json").read_text(encoding="utf-8"))
    return status, report, capsys.readouterr().out


def test_report_agrees_with_the_samples(data_json: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, report, printed = check(data_json, capsys, "--global-batch-size", "2", "--decode")
    assert status == 1  # on_bad_sample is raise: a run would end
    assert {reason: entry["rows"] for reason, entry in report["left_out"].items()} == {
        "image can't be decoded": 1,
        "placeholders and media don't match": 1,
        "longer than the length limit": 1,
    }
    assert "row 22" in report["left_out"]["image can't be decoded"]["first"][0]
    config = json.loads(data_json.read_text(encoding="utf-8"))["dataset_param"]
    config["basic_parameters"]["on_bad_sample"] = "skip"
    dataset = build_mm_dataset(config)
    samples = [sample for sample in (dataset[index] for index in range(len(dataset))) if "fault" not in sample]
    lengths = [len(sample["input_ids"]) for sample in samples]
    assert report["samples"] == len(lengths) == 21 and report["tokens"] == sum(lengths)
    assert report["targets"] == sum(int((sample["labels"] != -100).sum()) for sample in samples)
    assert report["lengths"]["max"] == max(lengths) and report["lengths"]["limit"] == 128
    assert report["media"] == {"image": {"rows": 1, "media": 2}}
    assert report["batches"]["padded"] == {"steps_per_epoch": 10, "padding": 0.0}  # one row a micro-batch
    packed = report["batches"]["packed"]
    packs = round(sum(lengths) / 128 / (1 - packed["padding"]))
    assert packs >= -(-sum(lengths) // 128) and packed["steps_per_epoch"] == packs // 2
    picture = Image.open(data_json.parent / "lengths.png")
    assert picture.format == "PNG" and picture.width > 400
    for said in ("rows: 24", "left out: 1 × image can't be decoded", "image: 2 in 1 rows", "packed:", "lengths.png"):
        assert said in printed


def test_damaged_pixels_are_found_by_decoding_only(data_json: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, report, _ = check(data_json, capsys)
    assert "image can't be decoded" not in report["left_out"] and report["samples"] == 22


def test_a_part_of_the_rows(data_json: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = data_json.parent / "out"
    assert main(["data", "check", str(data_json), "--rows", "4", "--output", str(folder), "--num-workers", "0"]) == 0
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert report["rows"] == 24 and report["looked_at"] == 4
    assert "rows: 24 (4 of them looked at)" in capsys.readouterr().out


def test_bad_input_is_said(data_json: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads(data_json.read_text(encoding="utf-8"))
    config["dataset_param"]["basic_parameters"]["datset"] = "x"
    data_json.write_text(json.dumps(config), encoding="utf-8")
    assert main(["data", "check", str(data_json)]) == 1
    assert "datset" in capsys.readouterr().err
    del config["dataset_param"]["basic_parameters"]["datset"]
    config["dataset_param"]["basic_parameters"]["cache_dir"] = "index"
    config["dataset_param"]["dataset_type"] = "corpus"
    data_json.write_text(json.dumps(config), encoding="utf-8")
    assert main(["data", "check", str(data_json)]) == 1
    assert "'dataset_param.dataset_type' is corpus: its documents are read whole" in capsys.readouterr().err


def test_says_where_it_writes_at_the_start_and_the_end(data_json: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = data_json.parent
    before = {path.name for path in folder.iterdir()}
    lines = check(data_json, capsys, "--rows", "2")[2].splitlines()
    assert lines[0].startswith(f"the report goes to {folder};")
    assert lines[-1] == f"written: {folder}/report.json, {folder}/lengths.png"
    assert {path.name for path in folder.iterdir()} - before == {"report.json", "lengths.png"}


def test_says_where_it_would_write_if_it_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data.json").write_text("{}", encoding="utf-8")
    assert main(["data", "check", str(tmp_path / "data.json")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"the report goes to {tmp_path};")
    assert lines[-1] == f"no complete report was written to {tmp_path}"
    assert [path.name for path in tmp_path.iterdir()] == ["data.json"]


def test_show_marks_what_is_trained(data_json: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, _, printed = check(data_json, capsys, "--show", "24", "--rows", "24")
    shown = printed.partition("rows: ")[0]
    assert shown.count("\u2500\u2500 ") == 24 and shown.count("left out: ") == 2
    assert "which digit<|im_end|>\n<|im_start|>assistant\n\u27e6seven <|im_end|>\u27e7" in shown
    assert ", image a.png, image a.png\n" in shown
    marked = re.findall("\u27e6(.*?)\u27e7", shown, re.DOTALL)
    assert all(text.endswith("<|im_end|>") for text in marked)
