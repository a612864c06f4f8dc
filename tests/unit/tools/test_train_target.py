"""What `mindspeed-mm train` starts for each way to write a launch down, and how it refuses others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from mindspeed_mm.tools.cli import main
from mindspeed_mm.tools.train.processes import parse_options
from mindspeed_mm.tools.train.target import find_target

GENERATION = {"predictor": {"model_id": "wan"}, "diffusion": {}, "ae": {}}


def program(content: dict[str, Any], folder: Path, *words: str) -> str:
    """The module that a file's processes run."""
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(content))
    target = find_target(str(path), words)
    assert target.words[2:] == (str(path), *words)
    return target.words[1].rpartition(".")[2]


def test_a_yaml_file_finds_its_script(tmp_path: Path) -> None:
    language: dict[str, Any] = {"gpt_args": {"train": {"lr": 1e-5}}, "model": {"model_id": "qwen3"}}
    assert program(language, tmp_path) == "pretrain_transformers"
    assert program(language, tmp_path, "--use-torch-fsdp2=false") == "pretrain_vlm"
    megatron = {**language, "gpt_args": {"train": {"use_torch_fsdp2": False}}}
    assert program(megatron, tmp_path) == "pretrain_vlm"
    assert program(megatron, tmp_path, "--use_torch_fsdp2") == "pretrain_transformers"
    for model in (GENERATION, {"init_from_diffusers": "ckpt/flux"}):
        assert program({"gpt_args": {}, "model": model}, tmp_path) == "pretrain_sora"
    assert program({"model": {"model_id": "qwen3_vl"}, "training": {}, "parallel": {}}, tmp_path) == "train_fsdp2"
    assert find_target(str(tmp_path), []).words[1] == "mindspeed_mm.entry.train_fsdp2"  # a run folder


def test_scripts_are_ours_or_a_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_target("pretrain_vlm.py", ["--lr", "1"]).words == ("-m", "mindspeed_mm.entry.pretrain_vlm", "--lr", "1")
    (tmp_path / "pretrain_vlm.py").touch()
    (tmp_path / "finetune.sh").touch()
    assert find_target("pretrain_vlm.py", ["--lr", "1"]).words == ("pretrain_vlm.py", "--lr", "1")
    assert find_target("finetune.sh", ["a"]).bash == "finetune.sh"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pretrain_vml.py"], "'pretrain_vml.py' is no file that starts a run, and is not there; did you mean"),
        (["nowhere.sh"], "'nowhere.sh' is no file that starts a run, and is not there; expected a run's .yaml file"),
        (["."], "'.' is a folder without run.yaml, so it is no run folder; expected a run's .yaml file, an entry"),
        (["nowhere.yaml"], "nowhere.yaml does not exist"),
        (["--nproc-per-nod", "2", "x.py"], "options of torchrun stand before what is started"),
        (["--nnodes", "2"], "the following arguments are required: training_script"),
    ],
)
def test_what_starts_nothing_gets_a_sentence(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", *words]) == 1
    said = capsys.readouterr().err
    assert message in said and len(said.splitlines()) <= 3


def test_nodes_meet_by_c10d_if_an_endpoint_is_given() -> None:
    alone = parse_options(["x.py"])
    assert alone.nproc_per_node == "1" and alone.rdzv_id != "none"
    pair = parse_options(["--nnodes", "2", "--rdzv-endpoint", "host:29500", "x.py"])
    assert pair.rdzv_backend == "c10d"
    fixed = parse_options(["--nnodes", "2", "--master-addr", "host", "--node-rank", "1", "x.py"])
    assert (fixed.rdzv_backend, fixed.rdzv_id) == ("static", "none")
