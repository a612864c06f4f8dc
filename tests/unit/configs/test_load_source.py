"""--load as the source of a model's configuration, where model.json names no directory that has one."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.configs.arguments import parse_args
from mindspeed_mm.configs.config import read_files
from mindspeed_mm.configs.other_scripts import FileKind
from mindspeed_mm.utils.errors import ConfigError

BACKEND_FLAGS = ["--use-torch-fsdp2", ""]


def merged(words: str, model: dict[str, Any], kind: FileKind = "language") -> Namespace:
    Path("model.json").write_text(json.dumps(model))
    minimal = "--mm-model model.json --mm-data data.json --micro-batch-size 1 --lr 1 --train-iters 1"
    args = parse_args(f"{minimal} {words}".split(), backends=("ptd", "fsdp2"))
    args.mm = read_files(args, kind, kind).files
    return args


@pytest.mark.parametrize("backend", BACKEND_FLAGS, ids=["FSDP2", "Megatron"])
def test_a_hf_directory_serves(backend: str, run_folder: Path, qwen3_dir: Path, said: list[str]) -> None:
    data = json.loads(Path("data.json").read_text())
    del data["dataset_param"]["preprocess_parameters"]
    Path("data.json").write_text(json.dumps(data))
    args = merged(f"{backend} --load {qwen3_dir}", {"model_id": "qwen3"})
    assert args.mm.model.init_from_hf_path == str(qwen3_dir)
    assert args.mm.data.dataset_param.preprocess_parameters.model_name_or_path == str(qwen3_dir)
    assert any("'init_from_hf_path' is missing; --load" in line for line in said)


def checkpoint(folder: Path, **state: Any) -> Path:
    (folder / "iter_0000002").mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("2")
    (folder / "iter_0000002" / ".metadata").touch()
    (folder / "iter_0000002" / "state.json").write_text(json.dumps(state))
    return folder


def test_beside_a_checkpoint_the_directory_that_its_run_was_started_from(
    run_folder: Path, qwen3_dir: Path, said: list[str]
) -> None:
    ckpt = checkpoint(run_folder / "ckpt", source=str(qwen3_dir))
    for backend in BACKEND_FLAGS:
        assert merged(f"{backend} --load {ckpt}", {"model_id": "qwen3"}).mm.model.init_from_hf_path == str(qwen3_dir)
    assert any("the run of --load was started from it" in line for line in said)


def test_beside_converted_weights_the_directory_of_the_tokenizer(run_folder: Path, said: list[str]) -> None:
    (run_folder / "hf" / "config.json").write_text('{"model_type": "qwen3"}')
    ckpt = checkpoint(run_folder / "ckpt")
    args = merged(f"--use-torch-fsdp2 --load {ckpt}", {"model_id": "qwen3", "text_decoder": {"num_layers": 2}})
    assert args.mm.model.init_from_hf_path == "./hf"
    assert any("as it is data.json's model_name_or_path" in line and "weights are those of" in line for line in said)


def test_what_has_no_configuration_is_refused_as_before(run_folder: Path) -> None:
    (run_folder / "empty").mkdir()
    for load in ("empty", checkpoint(run_folder / "ckpt")):
        with pytest.raises(ConfigError, match="'init_from_hf_path' is missing"):
            merged(f"--use-torch-fsdp2 --load {load}", {"model_id": "qwen3"})


def test_model_json_goes_before_load(run_folder: Path, qwen3_dir: Path) -> None:
    args = merged(f"--use-torch-fsdp2 --load {qwen3_dir}", {"init_from_hf_path": "./hf"})
    assert args.mm.model.init_from_hf_path == "./hf"


@pytest.mark.parametrize(
    ("file", "content", "key"),
    [("model_index.json", {}, "init_from_diffusers"), ("config.json", {"_class_name": "X"}, "from_pretrained")],
)
def test_a_diffusers_directory_serves(
    file: str, content: dict[str, Any], key: str, run_folder: Path, said: list[str]
) -> None:
    from mindspeed_mm.configs.config import MMConfig
    from mindspeed_mm.configs.load_source import settle_generation_source

    Path("hf", file).write_text(json.dumps(content))
    for predictor, taken in (({"model_id": "wan"}, True), ({"model_id": "wan", "hidden_size": 8}, False)):
        Path("model.json").write_text(json.dumps({"predictor": predictor}))
        mm = MMConfig({"model": "model.json"})
        settle_generation_source(Namespace(load="hf"), mm)
        place: Any = mm.model if key == "init_from_diffusers" else mm.model.predictor
        assert place.get(key) == ("hf" if taken else None)
    assert len(said) == 1 and key in said[0]
