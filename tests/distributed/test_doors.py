"""Flags and files, the YAML of gpt_args and the multimodal YAML describe one Run, and train to the same losses."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from mindspeed_mm.configs.describe import describe
from mindspeed_mm.configs.written_run import written_run
from mindspeed_mm.tasks.train.language import TRANSFORMERS
from tests.support.families import families
from tests.support.family_case import FamilyCase
from tests.support.launch import launch_flags, metrics_of, run_entry
from tests.support.runs import without_origin
from tests.support.workers import RankPool

STEPS = 3
TRAINER = "mindspeed_mm/fsdp/train/trainer.py"
#: flags; what the multimodal YAML calls them is in `multimodal`
FLAGS: dict[str, Any] = {
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 2,
    "train_iters": STEPS,
    "lr": 1e-3,
    "min_lr": 1e-4,
    "lr_decay_style": "cosine",
    "lr_warmup_fraction": 0.4,
    "weight_decay": 0.1,
    "adam_beta2": 0.95,
    "clip_grad": 0.5,
    "seed": 7,
    "log_interval": 1,
    "eval_interval": 0,
    "save_interval": STEPS,
    "no_save_optim": True,
    "num_workers": 0,
}
LOSS = {"loss_type": "per_token_loss", "router_aux_loss_coef": 0.0, "compute_mode": "chunk", "chunk_size": 8}


@functools.cache
def case_of(name: str) -> FamilyCase:
    return FamilyCase(name, Path(tempfile.mkdtemp(prefix=f"doors-{name}-")), families()[name])


def parts(case: FamilyCase) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Content of model.json, data.json and fsdp2.yaml."""
    prefix = "model.layers" if case.name == "qwen3" else "model.language_model.layers"
    data = json.loads(case.files["data.json"].read_text())
    data["dataset_param"]["basic_parameters"]["cutoff_len"] = 512
    model = {"init_from_hf_path": str(case.hf_dir), "freeze": [f"{prefix}.{{0}}.mlp"], "loss_cfg": LOSS}
    sharding = {
        "sharding_size": "auto",
        "sub_modules_to_wrap": list(case.family.wrap),
        "recompute_modules": [f"{prefix}.{{*}}"],
        "use_reentrant": False,
        "num_to_backward_prefetch": 1,
        "ignore_missing_modules": True,
    }
    return model, data, sharding


def flags_and_files(case: FamilyCase, folder: Path, save: str) -> list[str]:
    files = {**case.files, **{name: folder / name for name in ("model.json", "data.json", "fsdp2.yaml")}}
    for name, content in zip(("model.json", "data.json", "fsdp2.yaml"), parts(case), strict=True):
        files[name].write_text(json.dumps(content))
    return launch_flags(files, **{**FLAGS, "save": save, "ckpt_format": None, "adam_beta1": None, "no_report": None})


def gpt_args(case: FamilyCase, folder: Path, save: str) -> list[str]:
    model, data, sharding = parts(case)
    flags = {**FLAGS, "use_torch_fsdp2": True, "save": save}
    (folder / "gpt.yaml").write_text(
        yaml.safe_dump({"gpt_args": flags, "model": model, "data": data, "fsdp2": sharding, "tool": {}})
    )
    return [str(folder / "gpt.yaml"), "--distributed-backend", "gloo"]


def multimodal(case: FamilyCase, folder: Path, save: str) -> list[str]:
    model, data, sharding = parts(case)
    data["dataloader_param"]["num_workers"] = 0
    renamed = {"min_lr": "lr_min", "lr_warmup_fraction": "lr_warmup_ratio", "eval_interval": "val_interval"}
    training = {renamed.get(name, name): value for name, value in FLAGS.items() if name != "num_workers"}
    content = {
        "parallel": {
            "fsdp_plan": {"apply_modules": [*sharding["sub_modules_to_wrap"], "mtp"], "num_to_backward_prefetch": 1}
        },
        "model": {"model_name_or_path": model["init_from_hf_path"], "freeze": model["freeze"]},
        "data": data,
        "features": {
            "recompute": True,
            "recompute_plan": {"apply_modules": sharding["recompute_modules"]},
            "enable_chunk_loss": True,
            "chunkloss_plan": {"chunk_size": LOSS["chunk_size"]},
            "loss_cfg": {"loss_type": LOSS["loss_type"]},
        },
        "training": {**training, "lr": 0.5},
    }
    (folder / "trainer.yaml").write_text(yaml.safe_dump(content))
    words = [f"training.lr={FLAGS['lr']}", f"training.save={save}", "--distributed-backend", "gloo"]
    return [str(folder / "trainer.yaml"), *words]


Door = Callable[[FamilyCase, Path, str], list[str]]
DOORS: dict[str, tuple[Door, str]] = {
    "flags": (flags_and_files, "pretrain_transformers.py"),
    "gpt_args": (gpt_args, "pretrain_transformers.py"),
    "multimodal": (multimodal, TRAINER),
}
MODELS = ["qwen3_vl", pytest.param("qwen3", marks=pytest.mark.full)]


@pytest.mark.parametrize("name", MODELS)
def test_doors_describe_one_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    case = case_of(name)
    described = {door: describe(words(case, tmp_path, "run"), TRANSFORMERS) for door, (words, _) in DOORS.items()}
    runs = {door: without_origin(run) for door, run in described.items()}
    for run in runs.values():
        run["fsdp2"]["sub_modules_to_wrap"] = [path for path in run["fsdp2"]["sub_modules_to_wrap"] if path != "mtp"]
    for door in ("gpt_args", "multimodal"):
        for section, value in runs["flags"].items():
            assert runs[door][section] == value, (door, section)
    file = tmp_path / "run.yaml"
    for door, run in described.items():
        file.write_text(written_run(run, door))
        assert without_origin(describe([str(file)], TRANSFORMERS)) == without_origin(run), door


@pytest.mark.parametrize("name", MODELS)
def test_doors_train_to_the_same_losses(name: str, ranks2: RankPool, tmp_path: Path) -> None:
    found = {}
    for door, (words, script) in DOORS.items():
        save = tmp_path / door
        ranks2.run(run_entry, words(case_of(name), tmp_path, str(save)), script, timeout=180)
        found[door] = metrics_of(save)
    again = [str(tmp_path / "multimodal" / "run.yaml"), "--save", str(tmp_path / "again")]
    ranks2.run(run_entry, again, TRAINER, timeout=180)
    found["run.yaml"] = metrics_of(tmp_path / "again")
    losses, norms = found["flags"]
    assert len(losses) == STEPS and len(set(losses)) == STEPS and min(norms) > 0
    assert found["gpt_args"] == found["multimodal"] == found["flags"] == found["run.yaml"]
