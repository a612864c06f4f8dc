"""The extraction of features: its flags, rows that can't be used, and features made otherwise."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_mm.data.generation.buckets import Bucket, BucketTable
from mindspeed_mm.data.generation.feature_files import FeatureReader
from mindspeed_mm.tools.feature_extraction.command import main
from mindspeed_mm.tools.feature_extraction.extract import Extraction
from mindspeed_mm.utils.errors import DataError
from tests.support.launch import ROOT
from tests.support.tiny_wan import data_json, model_json, write_clips, write_encoders

ROWS = 7


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    return write_encoders(tmp_path_factory.mktemp("encoders"))


@pytest.fixture
def files(tmp_path, encoders):
    """Words of a command; model.json, data.json and tools.json can be changed in between."""
    content = {
        "model": model_json(encoders),
        "data": data_json(write_clips(tmp_path / "clips", rows=4)),
        "tool": {"sorafeature": {"save_path": str(tmp_path / "features")}},
    }
    words = ["--num-workers", "0"]
    for name, value in content.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
        words += [f"--mm-{name}", str(tmp_path / f"{name}.json")]
    return words


def change(path: Path, key: str, value: Any) -> None:
    content = json.loads(path.read_text())
    *parents, last = key.split(".")
    place = content
    for parent in parents:
        place = place[parent]
    place[last] = value
    path.write_text(json.dumps(content))


def rows_in(folder: Path) -> list[int]:
    lines = [line for index in folder.glob("index-*.jsonl") for line in index.read_text().splitlines()]
    return sorted(json.loads(line)["row"] for line in lines)


def test_the_published_script_takes_flags_of_a_training(tmp_path, files, monkeypatch, caplog):
    script = "mindspeed_mm/tools/feature_extraction/get_sora_feature.py"
    published = ["--lr", "1e-5", "--bf16", "--tensor_model_parallel_size=1", "--micro-batch-size", "3"]
    monkeypatch.setattr(sys, "argv", [script, *files, *published])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    assert ended.value.code == 0
    reader = FeatureReader([tmp_path / "features"])
    assert reader.rows.tolist() == [0, 1, 2, 3]
    sample, empty = reader.read(0), reader.empty()
    assert sample["latents"].shape == (4, 2, 4, 4) and sample["latents"].dtype == torch.float32
    assert empty["text.encoder_hidden_states"].shape == sample["text.encoder_hidden_states"].shape == (12, 16)
    assert "latents_std" not in sample
    assert "4 features made" in caplog.text


def test_the_published_script_of_wan_needs_no_predictor(tmp_path, files, monkeypatch, caplog):
    """Its published model.json describes the encoders only; the task is that of the data."""
    content = json.loads((tmp_path / "model.json").read_text())
    (tmp_path / "model.json").write_text(json.dumps({key: content[key] for key in ("ae", "text_encoder")}))
    script = "mindspeed_mm/tools/feature_extraction/get_wan_feature.py"
    published = ["--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1", "--context-parallel-size"]
    published += ["1", "--micro-batch-size", "1", "--global-batch-size", "1", "--distributed-backend", "nccl"]
    monkeypatch.setattr(sys, "argv", [script, *files, *published])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    assert ended.value.code == 0
    assert rows_in(tmp_path / "features") == [0, 1, 2, 3]
    assert "'predictor' is missing; features are made for 'wan', and 'task' t2v" in caplog.text


def test_the_published_script_of_vace_says_that_its_data_are_not_there_yet(tmp_path, files, monkeypatch, capsys):
    change(tmp_path / "data.json", "dataset_param.dataset_type", "vace")
    script = "mindspeed_mm/tools/feature_extraction/get_vace_feature.py"
    monkeypatch.setattr(sys, "argv", [script, *files])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    assert ended.value.code == 1
    assert "'dataset_param.dataset_type' is 'vace'; this dataset type is not there yet" in capsys.readouterr().err


def test_rows_that_cant_be_used_are_left_out_and_counted(tmp_path, files, caplog):
    clips = tmp_path / "clips"
    (clips / "001.mp4").write_bytes((clips / "001.mp4").read_bytes()[:300])
    (clips / "002.mp4").unlink()
    assert main(files) == 0
    assert rows_in(tmp_path / "features") == [0, 3]
    for said in ("2 rows left out: ", "1 × video not found", "001.mp4 can't be decoded", "'002.mp4'"):
        assert said in caplog.text
    write_clips(clips, rows=4)  # they are there now
    assert main(files) == 0
    assert rows_in(tmp_path / "features") == [0, 1, 2, 3]
    assert "2 were there before" in caplog.text


@pytest.mark.parametrize(
    ("file", "key", "value", "named"),
    [
        ("model", "ae.do_sample", True, "ae.do_sample false, and now it is true"),
        ("model", "text_encoder.max_length", 8, "text_encoder[0].max_length 12, and now it is 8"),
        ("data", "dataset_param.preprocess_parameters.max_height", 64, "preprocess_parameters.max_height 32"),
    ],
)
def test_features_made_otherwise_are_not_mixed(tmp_path, files, capsys, file, key, value, named):
    assert main(files) == 0
    change(tmp_path / f"{file}.json", key, value)
    assert main(files) == 1
    assert named in capsys.readouterr().err


def test_an_encoder_with_other_weights_is_another_one(tmp_path, files, encoders, capsys):
    assert main(files) == 0
    other = write_encoders(tmp_path / "other", seed=1)
    config = json.loads((other / "vae/config.json").read_text())
    (other / "vae/config.json").write_text(json.dumps({**config, "latents_mean": [0.0] * 4}))
    change(tmp_path / "model.json", "ae.from_pretrained", str(other / "vae"))
    assert main(files) == 1
    assert "ae.files" in capsys.readouterr().err


def test_only_video_leaves_captions_to_the_training(tmp_path, files):
    change(tmp_path / "model.json", "text_encoder.from_pretrained", "not there")
    assert main([*files, "--only", "video"]) == 0
    reader = FeatureReader([tmp_path / "features"])
    assert reader.names(0) == ["latents"]
    assert reader.empty() is None
    change(tmp_path / "tool.json", "sorafeature.extract_text_feature", False)  # the published way to say it
    assert main([*files, "--only", "video"]) == main(files) == 0


def test_validation_rows_are_seen_as_an_evaluation_sees_them(tmp_path, files, capsys):
    output = tmp_path / "valid"
    assert main([*files, "--validation", "--output", str(output)]) == 1
    assert "'basic_parameters.val_data_path' names no data" in capsys.readouterr().err
    basic = "dataset_param.basic_parameters"
    change(tmp_path / "data.json", f"{basic}.val_data_path", str(tmp_path / "clips/captions.jsonl"))
    assert main([*files, "--validation", "--output", str(output)]) == 0
    assert main(files) == 0
    valid, train = (FeatureReader([folder]).read(3)["latents"] for folder in (output, tmp_path / "features"))
    assert not torch.equal(valid, train)  # the middle of the clip, and a place drawn by its key


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--micro-batch-siz", "2"], "did you mean '--micro-batch-size'"),
        (["--onyl", "video"], "did you mean '--only'"),
        (["--micro-batch-size", "0"], "--micro-batch-size is 0; expected 1 or more"),
    ],
)
def test_wrong_flags_are_sentences(files, capsys, words, sentence):
    assert main([*files, *words]) == 1
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({}, "--output is missing"),
        ({"sorafeature": {"save_pth": "x"}}, "'save_path'"),
        ({"sorafeature": {"save_path": "x", "extract_video_feature": False}}, "write true"),
    ],
)
def test_tools_json_is_checked(tmp_path, files, capsys, content, sentence):
    (tmp_path / "tool.json").write_text(json.dumps(content))
    assert main(files) == 1
    assert sentence in capsys.readouterr().err


class Clips:
    """Rows without files: a video that holds its row's number, of one of two shapes."""

    shapes = BucketTable([Bucket(1, 2, 2), Bucket(1, 2, 4)])

    def __len__(self) -> int:
        return ROWS

    def bucket_of(self, index: int) -> int:
        return index % 2

    def get(self, index: int, piece: int = 0, epoch: int = 0) -> dict[str, Any]:
        return {"video": torch.full((3, *self.shapes[piece]), float(index)), "caption": f"row {index}"}

    def collate_fn(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        video = torch.stack([sample["video"] for sample in samples])
        return {"video": video, "captions": [sample["caption"] for sample in samples]}


class Encoder:
    """Takes the video for a latent, and a caption's length for its states."""

    def encode_clips(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"latents": batch["video"], "latents_std": None, "conditions": {"twice": batch["video"] * 2}}

    def encode_captions(self, captions: list[str]) -> dict[str, torch.Tensor]:
        return {"states": torch.tensor([[len(text)] * 3 for text in captions])}


@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_features_that_are_no_numbers_are_not_kept(tmp_path: Path, policy: str) -> None:
    """L07: an encoder that overflows: the row is left out and counted, or ends the extraction, by its name."""

    class Overflows(Encoder):
        def encode_clips(self, batch: dict[str, Any]) -> dict[str, Any]:
            made = super().encode_clips(batch)
            made["latents"] = torch.where(made["latents"] == 3, torch.inf, made["latents"])
            return made

    class Named(Clips):
        dataset_param = SimpleNamespace(basic_parameters=SimpleNamespace(on_bad_sample=policy))

        def where(self, index: int) -> str:
            return f"rows.json, row {index + 1}"

    extraction = Extraction(Named(), Overflows(), str(tmp_path), {"of": "numbers"})  # type: ignore[arg-type]
    if policy == "raise":
        with pytest.raises(DataError, match=r"rows\.json, row 4: the encoders' latents has 24 of 24 values"):
            extraction.run()
        return
    extraction.run()
    assert FeatureReader([tmp_path]).rows.tolist() == [row for row in range(ROWS) if row != 3]
