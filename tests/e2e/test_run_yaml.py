"""`run.yaml` of a run folder starts the same run, from another folder: the same losses and norms to the last digit.

Every kind of run is started in a folder by relative paths, as `mindspeed-mm train` starts it, in workers that are there
already.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from mindspeed_mm.monitor.metrics import read_metrics
from mindspeed_mm.tools.train.target import find_target
from tests.support.launch import ROOT, WRAP, WRAP_TEXT, launch_flags, write_run_files
from tests.support.tiny import write_mixed_dataset
from tests.support.tiny_wan import data_json, model_json, write_clips, write_encoders
from tests.support.workers import RankPool

STEPS = 5
LORA = {"lora_target_modules": "all-linear", "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.1}


def start(words: list[str], folder: str) -> None:
    """What a rank does of `mindspeed-mm train`, called in a folder."""
    before = sys.argv
    with contextlib.chdir(folder):
        target = find_target(words[0], words[1:])
        os.chdir(target.folder or os.curdir)
        is_module = target.words[0] == "-m"
        program, *rest = target.words[1:] if is_module else target.words
        sys.argv = [program, *rest]
        try:
            if is_module:
                runpy.run_module(program, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(program, run_name="__main__")
        finally:
            sys.argv = before


def language(folder: Path, hf_dir: Path, *, images: bool = False, **changes: Any) -> dict[str, Path]:
    """Files of a run in a folder, by relative paths; `changes` are those of `write_run_files`."""
    write_mixed_dataset(folder / "data", rows=14, images=images)
    (folder / "hf").symlink_to(hf_dir)
    wrap = {"sub_modules_to_wrap": WRAP if images else WRAP_TEXT}
    files = write_run_files(folder, Path("hf"), Path("data/data.json"), fsdp2=wrap, **changes)
    return {name: path.relative_to(folder) for name, path in files.items()}


def flags_of(files: dict[str, Path], **flags: Any) -> list[str]:
    settings = {"micro_batch_size": 1, "global_batch_size": 4, "train_iters": STEPS, **flags}
    return launch_flags(files, **settings)


def of_flags(folder: Path, hf_dir: Path) -> list[str]:
    return ["pretrain_transformers.py", *flags_of(language(folder, hf_dir))]


def of_lora(folder: Path, hf_dir: Path) -> list[str]:
    return ["pretrain_transformers.py", *flags_of(language(folder, hf_dir), **LORA)]


def of_packs_with_images(folder: Path, hf_dir: Path) -> list[str]:
    basic = "dataset_param.basic_parameters"
    data = {f"{basic}.neat_packing": True, f"{basic}.cutoff_len": 256}
    return ["pretrain_transformers.py", *flags_of(language(folder, hf_dir, images=True, data=data))]


def of_megatron(folder: Path, hf_dir: Path) -> list[str]:
    files = language(folder, hf_dir, model={"model_id": "qwen3"})
    flags = flags_of(files, use_torch_fsdp2=None, fsdp2_config_path=None, tensor_model_parallel_size=2)
    return ["pretrain_vlm.py", *flags]


def of_gpt_args(folder: Path, hf_dir: Path) -> list[str]:
    """The published YAML, with a value of the command line."""
    files = language(folder, hf_dir)
    model, data = (json.loads((folder / files[name]).read_text()) for name in ("model.json", "data.json"))
    flags = {"use_torch_fsdp2": True, "micro_batch_size": 1, "global_batch_size": 4, "train_iters": STEPS, "lr": 1e-3}
    flags |= {"fsdp2_config_path": "fsdp2.yaml", "num_workers": 0, "distributed_backend": "gloo", "seed": 1}
    (folder / "my.yaml").write_text(yaml.safe_dump({"gpt_args": flags, "model": model, "data": data}))
    return ["my.yaml", "gpt_args.seed=7", "--clip-grad", "0.5"]


def of_llm_fsdp2(folder: Path, hf_dir: Path) -> list[str]:
    """The YAML of train_fsdp2.py, whose data have a registry."""
    files = language(folder, hf_dir)
    attr = json.loads((folder / files["data.json"]).read_text())["dataset_param"]["attr"]
    tags = {name: value for name, value in attr.items() if name.endswith("_tag")}
    entry = {"file_name": "data.json", "formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": tags}
    (folder / "data/dataset_info.json").write_text(json.dumps({"mine": entry}))
    content = {
        "model": {"model_name_or_path": "hf"},
        "parallel": {"fsdp_size": 2, "fsdp_modules": WRAP_TEXT, "param_dtype": "fp32"},
        "data": {"dataset": "mine", "dataset_dir": "data", "cutoff_len": 256},
        "training": {"output_dir": "unused", "max_steps": STEPS, "gradient_accumulation_steps": 2, "lr": 1e-3},
    }
    (folder / "my.yaml").write_text(yaml.safe_dump(content))
    return ["my.yaml", "--distributed-backend", "gloo"]


def of_multimodal(folder: Path, hf_dir: Path) -> list[str]:
    """The YAML of the published trainer."""
    files = language(folder, hf_dir)
    data = json.loads((folder / files["data.json"]).read_text())
    data["dataloader_param"]["num_workers"] = 0
    training = {"micro_batch_size": 1, "gradient_accumulation_steps": 2, "train_iters": STEPS, "lr": 1e-3, "seed": 7}
    content = {
        "parallel": {"fsdp_plan": {"apply_modules": WRAP_TEXT}},
        "model": {"model_name_or_path": "hf"},
        "data": data,
        "features": {"loss_cfg": {"loss_type": "per_token_loss"}},
        "training": {**training, "log_interval": 1},
    }
    (folder / "my.yaml").write_text(yaml.safe_dump(content))
    return ["my.yaml", "training.lr=2e-3", "--distributed-backend", "gloo"]


def of_corpus(folder: Path, hf_dir: Path) -> list[str]:
    (folder / "texts").mkdir(parents=True)
    (folder / "texts/a.jsonl").write_text(
        "\n".join(json.dumps({"text": "the red digit is seven " * 9}) for _ in range(9))
    )
    basic = {"dataset": "texts", "dataset_dir": ".", "cache_dir": "index"}
    data = {f"dataset_param.basic_parameters.{name}": value for name, value in basic.items()}
    data |= {"dataset_param.dataset_type": "corpus", "dataset_param.corpus": {"append_eod": True}}
    return ["pretrain_transformers.py", *flags_of(language(folder, hf_dir, data=data), seq_length=24)]


def of_wan(folder: Path, hf_dir: Path) -> list[str]:
    with contextlib.chdir(folder):
        write_encoders(Path("encoders"))
        contents = {
            "model.json": model_json(Path("encoders")),
            "data.json": data_json(write_clips(Path("clips"), rows=6, pictures=2)),
            "tools.json": {},
            "fsdp2.yaml": {"sharding_size": "auto"},
        }
        for name, content in contents.items():
            Path(name).write_text(json.dumps(content))
    return ["pretrain_sora.py", *flags_of({name: Path(name) for name in contents})]


def of_own_script(folder: Path, hf_dir: Path) -> list[str]:
    """A script of the user's own beside its run, which launch.json names."""
    shutil.copy(ROOT / "tests/fixtures/user_scripts/pretrain_own_model.py", folder / "mine.py")
    contents = {
        "model.json": {"width": 10, "sharding": "mixin"},
        "data.json": {"rows": 24},
        "tools.json": {},
        "fsdp2.yaml": {"sharding_size": "auto"},
    }
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content))
    return ["mine.py", *flags_of({name: Path(name) for name in contents})]


#: kind of run → what starts it, and the fixture of its model's directory
KINDS: dict[str, tuple[Callable[[Path, Path], list[str]], str]] = {
    "flags": (of_flags, "qwen3_dir"),
    "gpt_args": (of_gpt_args, "qwen3_dir"),
    "train_fsdp2": (of_llm_fsdp2, "qwen3_dir"),
    "multimodal": (of_multimodal, "qwen3_dir"),
    "lora": (of_lora, "qwen3_dir"),
    "packs with images": (of_packs_with_images, "qwen2_5_vl_dir"),
    "own script": (of_own_script, "qwen3_dir"),
    "corpus": (of_corpus, "qwen3_dir"),
    "wan": (of_wan, "qwen3_dir"),
    "megatron": (of_megatron, "qwen3_dir"),
    "resumed": (of_flags, "qwen3_dir"),
}
IN_THE_SUITE = ("train_fsdp2", "resumed")
OF_MEGATRON = ("megatron", "corpus")


def figures(run: Path) -> list[tuple[int, float, float]]:
    records = [record for record in read_metrics(run / "metrics.jsonl") if "loss" in record]
    return [(record["iteration"], record["loss"], record["grad_norm"]) for record in records]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in IN_THE_SUITE else pytest.mark.full) for kind in KINDS]
)
def test_the_same_run_again(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    make, fixture = KINDS[kind]
    pool: RankPool = (
        request.getfixturevalue("megatron_pools")[2] if kind in OF_MEGATRON else request.getfixturevalue("ranks2")
    )
    folder, elsewhere = tmp_path / "mine", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    words = [*make(folder, request.getfixturevalue(fixture)), "--save", "runs/one"]
    if kind == "resumed":
        pool.run(start, [*words, "--train-iters", "2", "--save-interval", "2"], str(folder), timeout=120)
        words = [*words, "--load", "runs/one"]
    pool.run(start, words, str(folder), timeout=120)
    expected = figures(folder / "runs/one")
    assert [iteration for iteration, _, _ in expected] == list(range(1, STEPS + 1))
    assert len({loss for _, loss, _ in expected}) > 2
    pool.run(start, [str(folder / "runs/one"), "--save", "two"], str(elsewhere), timeout=120)
    assert figures(elsewhere / "two") == expected
    shutil.move(folder, tmp_path / "moved")  # with the run folder in it
    pool.run(start, [str(tmp_path / "moved/runs/one/run.yaml"), "--save", "three"], str(elsewhere), timeout=120)
    assert figures(elsewhere / "three") == expected
