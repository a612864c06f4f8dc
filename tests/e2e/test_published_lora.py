"""Published launch scripts with LoRA train: their flags, files and variables, on tiny directories.

Exchanged are paths, the numbers of a model that the tiny one doesn't have, the number of processes, workers and steps.
"""

from __future__ import annotations

import functools
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader

from mindspeed_mm.monitor.metrics import read_metrics
from mindspeed_mm.tools.convert import main as mm_convert
from tests.e2e.test_published_scripts import directory_of, rows, start
from tests.parity.test_features import extract
from tests.parity.test_lora import ROWS as ALL_ROWS
from tests.parity.test_lora import TEXT_TARGETS, model_and_data, reference
from tests.support import published_launches
from tests.support.launch import WRAP_TEXT, launch_flags, metrics_of, run_entry, write_run_files
from tests.support.published_launches import Launch
from tests.support.tiny_diffusers import diffusers_config
from tests.support.tiny_wan import data_json, model_json, write_clips, write_encoders
from tests.support.workers import RankPool

STEPS, RANKS, ROWS = 3, 2, 4
#: launch → what it trains; the first of each entry script is in the default suite
LAUNCHES = {
    "magistral 2509 LoRA": "mistral3",
    "wan2.1 1.3B t2v LoRA": "t2v",
    "qwen3vl 30B-A3B LoRA": "qwen3_vl_moe",
    "wan2.1 14B t2v LoRA": "t2v",
    "wan2.1 14B i2v LoRA": "i2v",
    "wan2.2 A14B t2v LoRA high": "t2v",
    "wan2.2 A14B t2v LoRA low": "t2v",
}
FIRST = ("magistral 2509 LoRA", "wan2.1 1.3B t2v LoRA")
#: sizes in model.json of a Wan transformer
_TINY = {"hidden_size": 24, "num_heads": 2, "ffn_dim": 32, "num_layers": 2, "pipeline_num_layers": [1, 1]}
_TINY |= {"freq_dim": 32, "text_dim": 16, "in_dim": 4, "out_dim": 4, "max_seq_len": 64, "img_dim": 20}
_PICTURES = {"in_channels": 12, "image_dim": 20, "added_kv_proj_dim": 24}


@functools.cache
def workspace() -> Path:
    return Path(tempfile.mkdtemp(prefix="published-lora-"))


@functools.cache
def pipeline() -> Path:
    return write_encoders(workspace() / "pipeline")


@functools.cache
def transformer(task: str) -> Path:
    from diffusers import WanTransformer3DModel

    config = {**diffusers_config("wan"), **(_PICTURES if task == "i2v" else {})}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        WanTransformer3DModel(**config).save_pretrained(workspace() / task)
    return workspace() / task


@functools.cache
def clips() -> Path:
    return write_clips(workspace() / "clips", rows=ROWS)


@functools.cache
def features(task: str) -> Path:
    return extract(workspace() / f"features {task}", model_json(pipeline(), task), data_json(clips()))


def of_generation(launch: Launch, task: str) -> dict[str, Path]:
    """Exchange sizes; return paths."""
    launch.model |= {f"predictor.{name}": value for name, value in _TINY.items()}
    parts = {part: pipeline() / part for part in ("vae", "text_encoder", "tokenizer")}
    if task == "i2v":
        launch.model["predictor.in_dim"] = _PICTURES["in_channels"]
    if launch.data["dataset_param.dataset_type"] == "feature":
        made = features(task)
        return {"hf": transformer(task), "rows": made, "folder": made, **parts}
    shape = {"num_frames": 5, "max_height": 32, "max_width": 32, "max_hxw": 32 * 32}
    launch.data |= {f"dataset_param.preprocess_parameters.{name}": value for name, value in shape.items()}
    list_of_folders = clips().with_name("data.txt")
    list_of_folders.write_text(f"{clips().parent},{clips()}\n")
    return {"hf": transformer(task), "rows": list_of_folders, **parts}


def of_language(launch: Launch, family: str, folder: Path) -> dict[str, Path]:
    """Convert the base as the published commands do it; return paths."""
    hf_dir = directory_of(family)
    converter = "Mistral3Converter" if family == "mistral3" else "Qwen3VLConverter"
    base = folder / "lora-base"
    words = f"{converter} hf_to_dcp --hf_dir {hf_dir} --dcp_dir {base} --is_lora_base true".split()
    assert mm_convert(words) == 0
    launch.arguments()[launch.key("load")] = str(base)
    return {"hf": hf_dir, "rows": rows(), "folder": rows().parent, "cache": folder / "cache"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FIRST else [pytest.mark.full]) for name in LAUNCHES]
)
def test_it_trains_adapters(name: str, ranks2: RankPool, tmp_path: Path) -> None:
    launch, kind = published_launches.launch(name), LAUNCHES[name]
    is_sora = launch.entry == "pretrain_sora.py"
    paths = of_generation(launch, kind) if is_sora else of_language(launch, kind, tmp_path)
    arguments, key = launch.arguments(), launch.key
    arguments |= {key("train_iters"): STEPS, key("global_batch_size"): ROWS, key("num_workers"): 0}
    del arguments[key("no_save_optim")]
    words = launch.write(tmp_path / "run", **paths, save=tmp_path / "save")
    ranks2.run(start, [*words, "--save-hf"], launch.entry, launch.environment, timeout=170)
    steps = read_metrics(tmp_path / "save/metrics.jsonl")
    assert [step["iteration"] for step in steps] == [*range(1, STEPS + 1)]
    assert all(math.isfinite(step["loss"]) and step["grad_norm"] > 0 for step in steps)
    stored = FileSystemReader(tmp_path / f"save/iter_{STEPS:07d}").read_metadata().state_dict_metadata
    assert stored and all(".lora_" in tensor for tensor in stored)
    written = adapters_in(tmp_path / "save/hf")
    for tensor in (value for tensor_name, value in written.items() if "lora_B" in tensor_name):
        assert tensor.abs().max() > 0  # trained: B begins with zeros
    assert layers_of(written) == expected_layers(launch, kind, paths["hf"])


def adapters_in(directory: Path) -> dict[str, torch.Tensor]:
    (file,) = directory.glob("*.safetensors")
    return load_file(file)


def layers_of(adapters: dict[str, torch.Tensor]) -> set[str]:
    """Paths of the layers that have adapters, without the prefixes of files."""
    paths = {name.partition(".lora_")[0] for name in adapters}
    return {path.removeprefix("base_model.model.").removeprefix("transformer.") for path in paths}


def expected_layers(launch: Launch, kind: str, hf_dir: Path) -> set[str]:
    """The layers that the launch names, in a model of the library's own class; frozen parts have none."""
    if launch.entry == "pretrain_sora.py":
        blocks = {f"blocks.{number}" for number in range(2)}
        of_block = [f"{attention}.to_{name}" for attention in ("attn1", "attn2") for name in ("q", "k", "v", "out.0")]
        of_block += ["ffn.net.0.proj", "ffn.net.2"]
        return {f"{block}.{layer}" for block in blocks for layer in of_block}
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(hf_dir)
    targets: Any = launch.arguments().get(launch.key("lora_target_modules"))
    if targets is None:
        targets = launch.arguments()["lora_args.lora_target_modules"].split(",")
    return {
        path
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and path.rpartition(".")[2] in targets and "language_model" in path
    }


def test_adapters_of_published_folders(ranks1: RankPool, tmp_path: Path) -> None:
    """As published launches go on: --load is a torch_dcp folder of adapters, --load-base-model that of their base."""
    start, losses, _, _ = reference("text", TEXT_TARGETS, ())
    hf_dir, data = model_and_data("text")
    inside = {
        name.replace("base_model.model.", "base_model.model.model.", 1).replace(".weight", ".default.weight"): value
        for name, value in load_file(start / "adapter_model.safetensors").items()
    }
    folder, base = tmp_path / "adapters", tmp_path / "base"
    dcp.save(inside, checkpoint_id=folder / "release", no_dist=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("release")
    assert mm_convert(f"GenericDCPConverter hf_to_dcp --hf_dir {hf_dir} --dcp_dir {base}".split()) == 0
    files = write_run_files(tmp_path / "files", hf_dir, data, fsdp2={"sub_modules_to_wrap": WRAP_TEXT})
    settings = {"lora_target_modules": ",".join(TEXT_TARGETS), "lora_r": 4, "lora_alpha": 8}
    sizes = {"micro_batch_size": 2, "global_batch_size": ALL_ROWS, "train_iters": STEPS}
    places = {"load": folder, "load_base_model": base, "save": tmp_path / "run"}
    ranks1.run(run_entry, launch_flags(files, **settings, **sizes, **places), timeout=120)
    assert metrics_of(tmp_path / "run")[0] == pytest.approx(losses, rel=1e-6)
