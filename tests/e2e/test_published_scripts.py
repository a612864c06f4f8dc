"""Published launch scripts of language models: their flags, files and variables, as they are.

Each is described in this process with its own number of processes; only paths are exchanged. Some train two steps on
two processes: there also the numbers of a model that the tiny one doesn't have, sizes of the layout, workers and steps.
"""

from __future__ import annotations

import functools
import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.configs.describe import describe
from mindspeed_mm.configs.fsdp2_config import load_fsdp2_config
from mindspeed_mm.configs.lora import lora_options
from mindspeed_mm.configs.written_run import written_run
from mindspeed_mm.dry_run import dry_run
from mindspeed_mm.monitor.metrics import read_metrics
from mindspeed_mm.tasks.train.generation import SORA
from mindspeed_mm.tasks.train.language import TRANSFORMERS, VLM
from tests.support import published_launches
from tests.support.families import families
from tests.support.launch import ROOT, run_entry
from tests.support.published_launches import Launch
from tests.support.runs import described_args, without_origin
from tests.support.tiny import tiny_qwen2_5_vl_dir, write_mixed_dataset
from tests.support.workers import RankPool

RECIPES = {"pretrain_vlm.py": VLM, "pretrain_transformers.py": TRANSFORMERS, "pretrain_sora.py": SORA}
#: parts of a pipeline that files of generation models name
PARTS = ("vae", "text_encoder", "tokenizer")
LAUNCHES = published_launches.names()
#: launches whose model.json names no directory: config.json of what --load names
BY_LOAD = {
    "qwen2.5omni 7B": {"model_type": "qwen2_5_omni_thinker"},
    "qwen2.5vl 72B FSDP2": {"model_type": "qwen2_5_vl"},
}


def prepared(name: str, launch: Launch, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Write a launch's files, with directories that hold nothing but a config.json; returns its words."""
    for place in ("hf", "rows", *PARTS):
        (folder / place).mkdir()
    for place in ("hf", *PARTS):
        (folder / place / "config.json").write_text("{}")
    (folder / "hf" / "config.json").write_text(json.dumps(BY_LOAD.get(name, {})))
    variables = launch.environment | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(launch.processes)}
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    paths = {"hf": folder / "hf", "rows": folder / "rows" / "rows.json", "folder": folder / "rows"}
    paths |= {part: folder / part for part in PARTS}
    monkeypatch.chdir(ROOT)
    return launch.write(folder / "run", **paths, cache=folder / "cache", save=folder / "save")


@pytest.mark.parametrize("name", LAUNCHES)
def test_it_is_described(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but paths is exchanged."""
    launch = published_launches.launch(name)
    words = prepared(name, launch, tmp_path, monkeypatch)
    args = described_args(words, RECIPES[launch.entry])
    arguments = launch.arguments()
    assert args.global_batch_size == int(arguments[launch.key("global_batch_size")])
    for flag, otherwise in (("clip_grad", 1.0), ("lr", 1e-5), ("seed", 1234), ("lora_r", 8), ("lora_alpha", 16)):
        assert getattr(args, flag) == float(arguments.get(launch.key(flag), otherwise)), flag
    assert args.data_parallel_size * args.tensor_model_parallel_size * args.pipeline_model_parallel_size == (
        launch.processes
    )
    if launch.fsdp2 is not None:
        config = load_fsdp2_config(args.fsdp2_config_path)
        assert (config.param_dtype, config.reduce_dtype) == ("bf16", launch.fsdp2["reduce_dtype"])
    assert bool(lora_options(args)) == name.partition(" LoRA")[1].startswith(" LoRA")


@pytest.mark.parametrize("name", LAUNCHES)
def test_its_run_file_describes_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = published_launches.launch(name)
    words = prepared(name, launch, tmp_path, monkeypatch)
    run, file = describe(words, RECIPES[launch.entry]), tmp_path / "run.yaml"
    file.write_text(written_run(run, name), encoding="utf-8")
    assert without_origin(describe([str(file)], RECIPES[launch.entry])) == without_origin(run)


def test_it_is_planned_at_its_own_world_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the numbers of its own size: every entry of its path lists matches modules of the model."""
    name = "qwen2.5vl 72B FSDP2"
    launch = published_launches.launch(name)
    words = prepared(name, launch, tmp_path, monkeypatch)
    make, parameters = families()["qwen2_5_vl"].published["72B"]
    config = {**make().to_dict(), "architectures": ["Qwen2_5_VLForConditionalGeneration"]}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    assert dry_run(VLM, [*words, "--dry-run"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["model"]["parameters"] == parameters
    assert (answer["layout"]["world_size"], answer["layout"]["dp_shard"]) == (64, 64)
    layers = [f"model.language_model.layers.{n}" for n in range(80)]
    assert answer["recomputed"] == layers and {*layers, "lm_head"} <= {*answer["units"]}
    assert answer["ignored"] == ["model.visual"]


#: launch → family of its tiny model
TINY = {
    "qwen2.5vl 7B": "qwen2_5_vl",
    "qwen3vl 8B": "qwen3_vl",
    "qwen3omni 30B": "qwen3_omni_moe",
}
FULL = {
    "internvl3.5 30B": "internvl_moe",
    "magistral 2509": "mistral3",
    "qwen2.5vl 3B": "qwen2_5_vl",
    "qwen2.5vl 32B": "qwen2_5_vl",
    "qwen2.5vl 72B": "qwen2_5_vl",
    "qwen3vl 30B-A3B": "qwen3_vl_moe",
    "glm4.5v 106B": "glm4v_moe",
}
#: launch → tensor and pipeline parallel size of its two processes, where it isn't data parallel
LAYOUTS = {"qwen2.5vl 7B": (1, 2), "qwen2.5vl 32B": (2, 1), "qwen2.5vl 72B": (1, 2)}


@functools.cache
def workspace() -> Path:
    return Path(tempfile.mkdtemp(prefix="published-scripts-"))


@functools.cache
def directory_of(family: str) -> Path:
    """A tiny directory of the family; layers and heads enough for two stages or two tensor-parallel ranks."""
    path = workspace() / family
    path.mkdir()
    if family == "qwen2_5_vl":
        return tiny_qwen2_5_vl_dir(path, deep=True)
    made = families()[family].make(path)
    if family == "internvl_moe":  # normalised as the published directory says it, and the launch too
        file = made / "processor_config.json"
        content = json.loads(file.read_text())
        for part in ("image_processor", "video_processor"):
            content[part] |= {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
        file.write_text(json.dumps(content))
    return made


@functools.cache
def rows() -> Path:
    return write_mixed_dataset(workspace() / "data", rows=8, seed=1)


def rows_of(launch: Launch) -> Path:
    """The rows in the form that the launch's data.json names."""
    if launch.data.get("dataset_param.dataset_type") != "multimodal":
        return rows()
    roles = {"user": "human", "assistant": "gpt", "system": "system"}
    file = rows().with_name("internvl.json")
    file.write_text(
        json.dumps(
            [
                {
                    "conversations": [{"from": roles[t["role"]], "value": t["content"]} for t in row["messages"]],
                    "image": row["images"],
                }
                for row in json.loads(rows().read_text())
            ]
        )
    )
    return file


def shrink(launch: Launch, name: str, hf_dir: Path) -> None:
    """Exchange sizes."""
    launch.environment.pop("GLOO_SOCKET_IFNAME", None)  # a network interface of the machine, to be written by hand
    arguments, key = launch.arguments(), launch.key
    arguments |= {key("train_iters"): 2, key("global_batch_size"): 4, key("num_workers"): 0}
    if launch.fsdp2 is None:
        tensor, pipeline = LAYOUTS.get(name, (1, 1))
        sizes = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline}
        arguments |= {key(flag): size for flag, size in sizes.items()}
        launch.model |= megatron_sizes(json.loads((hf_dir / "config.json").read_text()), pipeline)
    if "dataset_param.image_size" in launch.data:  # tiles of 32 pixels
        launch.data["dataset_param.image_size"] = 32
        for step in launch.data["dataset_param.preprocess_parameters.train_pipeline.image"]:
            if step["trans_type"] == "Resize":
                step["param"]["size"] = [32, 32]


def megatron_sizes(config: Mapping[str, Any], pipeline: int) -> dict[str, Any]:
    """The numbers of model.json that the tiny model has."""
    text, vision = config["text_config"], config["vision_config"]
    merged = vision["hidden_size"] * vision["spatial_merge_size"] ** 2
    decoder = {
        "num_layers": text["num_hidden_layers"],
        "pipeline_num_layers": {1: [4], 2: [1, 3]}[pipeline],
        "hidden_size": text["hidden_size"],
        "ffn_hidden_size": text["intermediate_size"],
        "num_attention_heads": text["num_attention_heads"],
        "num_query_groups": text["num_key_value_heads"],
        "vocab_size": text["vocab_size"],
        "layernorm_epsilon": text["rms_norm_eps"],
        "mrope_section": text["rope_parameters"]["mrope_section"],
        "untie_embeddings_and_output_weights": True,
    }
    tower = {
        "num_layers": vision["depth"],
        "pipeline_num_layers": {1: [4], 2: [4, 0]}[pipeline],
        "hidden_size": vision["hidden_size"],
        "ffn_hidden_size": vision["intermediate_size"],
        "intermediate_size": vision["intermediate_size"],
        "num_attention_heads": vision["num_heads"],
        "tokens_per_second": vision["tokens_per_second"],
        "window_attn_size": vision["window_size"],
        "fullatt_block_indexes": vision["fullatt_block_indexes"],
    }
    projector = {
        "input_size": vision["hidden_size"],
        "ffn_hidden_size": merged,
        "hidden_size": text["hidden_size"],
    }
    parts = {
        "text_decoder": decoder,
        "image_encoder.vision_encoder": tower,
        "image_encoder.vision_projector": projector,
    }
    sizes = {f"{part}.{name}": value for part, values in parts.items() for name, value in values.items()}
    tokens = {name: config[name] for name in ("vision_start_token_id", "video_token_id")}
    return sizes | tokens | {"img_context_token_id": config["image_token_id"]}


def start(words: list[str], entry: str, variables: Mapping[str, str]) -> None:
    """As the script does it: from the checkout's root, with its variables."""
    before = os.getcwd()
    os.environ.update(variables)
    os.chdir(ROOT)
    try:
        run_entry(words, entry)
    finally:
        os.chdir(before)


@pytest.mark.parametrize("name", [*TINY, *(pytest.param(name, marks=pytest.mark.full) for name in FULL)])
def test_it_trains(name: str, ranks2: RankPool, megatron_pools: dict[int, RankPool], tmp_path: Path) -> None:
    launch, hf_dir = published_launches.launch(name), directory_of((TINY | FULL)[name])
    shrink(launch, name, hf_dir)
    paths = {"hf": hf_dir, "rows": rows_of(launch), "folder": rows().parent, "cache": workspace() / "cache"}
    words = launch.write(tmp_path / "run", **paths, save=tmp_path / "save")
    pool = ranks2 if launch.fsdp2 is not None else megatron_pools[2]
    pool.run(start, words, launch.entry, launch.environment, timeout=170)
    steps = read_metrics(tmp_path / "save/metrics.jsonl")
    assert [step["iteration"] for step in steps] == [1, 2]
    assert all(
        math.isfinite(step["loss"]) and step["grad_norm"] > 0 and step["tokens_per_second"] > 0 for step in steps
    )
    assert (tmp_path / "save/latest_checkpointed_iteration.txt").read_text() == "2"
