"""Cases of the kind FSDP2 wrapping about tied weights and idle towers: what config.json says twice, or nowhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mindspeed_mm.models.transformers_model import TransformersModel
from tests.support.families.llava import FAMILY as LLAVA
from tests.support.launch import WRAP, launch_flags, metrics_of, run_entry, write_run_files
from tests.support.tiny import tiny_qwen2_5_vl_dir, write_mixed_dataset
from tests.support.workers import RankPool

ABSENT = object()
KEY = "tie_word_embeddings"


def is_tied(hf_dir: Path, outer: Any, inner: Any) -> bool:
    """Whether a model built of the directory has one weight, with both keys of config.json set as said."""
    config = json.loads((hf_dir / "config.json").read_text(encoding="utf-8"))
    for part, value in ((config, outer), (config["text_config"], inner)):
        part.pop(KEY, None)
        if value is not ABSENT:
            part[KEY] = value
    (hf_dir / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with torch.device("meta"):
        model = TransformersModel({"init_from_hf_path": str(hf_dir)}).model
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
@pytest.mark.parametrize(
    "outer, inner, tied",
    [(ABSENT, False, False), (ABSENT, True, True), (False, ABSENT, False), (True, ABSENT, True), (True, True, True)],
)
def test_one_place_decides(tmp_path: Path, family: str, outer: Any, inner: Any, tied: bool) -> None:
    """F05: the text configuration decides where the outer key is absent, else the outer key."""
    make = LLAVA.make if family == "llava" else tiny_qwen2_5_vl_dir
    assert is_tied(make(tmp_path / "hf"), outer, inner) == tied


@pytest.mark.parametrize("outer, inner", [(True, False), (False, True)])
def test_a_contradiction_is_told(
    tmp_path: Path, outer: bool, inner: bool, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """F05: both keys, and they differ: transformers' own reading stays, and the notice names both."""
    from transformers import AutoConfig

    hf_dir = tiny_qwen2_5_vl_dir(tmp_path / "hf")
    tied = is_tied(hf_dir, outer, inner)
    assert tied == AutoConfig.from_pretrained(hf_dir).tie_word_embeddings
    said = capsys.readouterr().out + caplog.text
    assert f"{KEY} is {json.dumps(outer)} and text_config's is {json.dumps(inner)}" in said


def test_the_untie_flag_does_not_untie(ranks1: RankPool, tmp_path: Path) -> None:
    """F05: a published script's --untie-embeddings-and-output-weights against a tied model: one weight stays one."""
    hf_dir = tiny_qwen2_5_vl_dir(tmp_path / "hf", tie=True)
    data = write_mixed_dataset(tmp_path / "data", rows=4, seed=1)
    files = write_run_files(tmp_path, hf_dir, data, fsdp2={"sub_modules_to_wrap": WRAP})
    flags = {"micro_batch_size": 1, "global_batch_size": 4, "train_iters": 1, "save": tmp_path / "run"}
    words = launch_flags(files, **flags, save_hf=True, no_save_optim=True, untie_embeddings_and_output_weights=True)
    ranks1.run(run_entry, words, timeout=120)
    exported = load_file(tmp_path / "run/hf/model.safetensors")
    assert "lm_head.weight" not in exported and len(metrics_of(tmp_path / "run")[0]) == 1


def test_text_only_rows_leave_the_tower_alone(ranks2: RankPool, qwen2_5_vl_dir: Path, tmp_path: Path) -> None:
    """F02: a trainable tower that no row of a global batch feeds keeps its weights (no decay), and a resume works."""
    data = write_mixed_dataset(tmp_path / "data", rows=4, seed=1, images=False)
    files = write_run_files(tmp_path, qwen2_5_vl_dir, data, fsdp2={"sub_modules_to_wrap": WRAP})
    settings = {"micro_batch_size": 1, "global_batch_size": 4, "save": tmp_path / "run", "save_hf": True}
    settings |= {"weight_decay": 1.0, "lr": 0.01}
    ranks2.run(run_entry, launch_flags(files, train_iters=2, **settings), timeout=120)
    ranks2.run(run_entry, launch_flags(files, train_iters=3, load=tmp_path / "run", **settings), timeout=120)
    assert len(metrics_of(tmp_path / "run")[0]) == 3
    before, after = load_file(qwen2_5_vl_dir / "model.safetensors"), load_file(tmp_path / "run/hf/model.safetensors")
    towers = [k for k in before if "visual" in k]
    assert towers and all(torch.equal(before[k], after[k]) for k in towers)
    assert not torch.equal(before["lm_head.weight"], after["lm_head.weight"])
