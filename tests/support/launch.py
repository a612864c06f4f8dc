"""Run the real entry script inside a worker process, as a launcher would, and read what it wrote."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
WRAP = ["model.visual.blocks.{*}", "model.language_model.layers.{*}"]
WRAP_TEXT = ["model.layers.{*}"]


def write_run_files(
    folder: Path,
    hf_dir: Path,
    data_file: Path,
    *,
    model: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    fsdp2: dict[str, Any] | None = None,
) -> dict[str, Path]:
    """Write model.json, data.json, tools.json and fsdp2.yaml of a run.

    Args:
        model, fsdp2: keys added to (or replacing) the defaults.
        data: dotted paths of data.json → values.
    """
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "dataset_param": {
            "dataset_type": "huggingface",
            "basic_parameters": {"dataset": str(data_file), "dataset_dir": str(data_file.parent)},
            "preprocess_parameters": {"model_name_or_path": str(hf_dir)},
            "attr": {
                "images": "images",
                "messages": "messages",
                "role_tag": "role",
                "content_tag": "content",
                "user_tag": "user",
                "assistant_tag": "assistant",
                "system_tag": "system",
                "formatting": "sharegpt",
            },
        },
        "dataloader_param": {
            "dataloader_mode": "sampler",
            "sampler_type": "BaseRandomBatchSampler",
            "shuffle": True,
            "drop_last": True,
            "collate_param": {"model_name": "qwen2vl", "ignore_pad_token_for_loss": True},
        },
    }
    for path, value in (data or {}).items():
        *parents, last = path.split(".")
        place = content
        for name in parents:
            place = place.setdefault(name, {})
        place[last] = value
    files = {name: folder / name for name in ("model.json", "data.json", "tools.json", "fsdp2.yaml")}
    files["model.json"].write_text(json.dumps({"init_from_hf_path": str(hf_dir), **(model or {})}))
    files["data.json"].write_text(json.dumps(content))
    files["tools.json"].write_text("{}")
    files["fsdp2.yaml"].write_text(yaml.safe_dump({"sharding_size": "auto", **(fsdp2 or {})}))
    return files


def launch_flags(files: dict[str, Path], **flags: Any) -> list[str]:
    """Words of a launch command; True is a bare flag, a list gives several words, None leaves one out."""
    settings: dict[str, Any] = {
        "use_torch_fsdp2": True,
        "fsdp2_config_path": files["fsdp2.yaml"],
        "mm_model": files["model.json"],
        "mm_data": files["data.json"],
        "mm_tool": files["tools.json"],
        "ckpt_format": "torch_dcp",
        "lr": "1e-3",
        "lr_decay_style": "constant",
        "weight_decay": 0.1,
        "clip_grad": 1.0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "seed": 42,
        "num_workers": 0,
        "log_interval": 1,
        "distributed_backend": "gloo",
        "no_report": True,  # a process more for each of many runs; tests of the report ask for it
        **flags,
    }
    words: list[str] = []
    for name, value in settings.items():
        if value is None or value is False:
            continue
        words.append("--" + name.replace("_", "-"))
        if value is not True:
            words.extend(map(str, value) if isinstance(value, list) else [str(value)])
    return words


def run_entry(words: list[str], script: str = "pretrain_transformers.py") -> None:
    """Run an entry script of the project in this process with `words` as its command line."""
    before = sys.argv
    sys.argv = [script, *words]
    try:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    finally:
        sys.argv = before


def metrics_of(folder: Path) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of the steps in a run folder."""
    records = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    steps = [r for r in records if "loss" in r]
    return [r["loss"] for r in steps], [r["grad_norm"] for r in steps]


def fresh(folder: Path) -> Path:
    """An empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
