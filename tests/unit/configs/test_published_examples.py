"""The launch scripts of examples/qwen2.5vl: their flags and files are taken as they are."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from mindspeed_mm.configs.arguments import parse_args, validate_args
from mindspeed_mm.configs.config import merge_mm_args
from mindspeed_mm.configs.fsdp2_config import load_fsdp2_config
from mindspeed_mm.configs.model_config import TransformersModelConfig
from mindspeed_mm.configs.vlm_config import VLMModelConfig, check_pipeline_layers

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples" / "qwen2.5vl"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.sh"))
_LAUNCHER = '#!/bin/sh\nprintf "%s\\n" "$@" > "$LAUNCHED"\n'


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: a checkout's scripts and configurations, with directories in the places of the weights."""
    (tmp_path / "examples").mkdir()
    shutil.copytree(EXAMPLES, tmp_path / "examples" / "qwen2.5vl")
    shutil.copy(ROOT / "examples" / "env_config.sh", tmp_path / "examples")
    for name in ("scripts", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    for size in ("3B", "7B", "32B", "72B"):
        for kind in ("hf_path", "mm_path"):
            (tmp_path / "ckpt" / kind / f"Qwen2.5-VL-{size}-Instruct").mkdir(parents=True)
    launcher = tmp_path / "bin" / "torchrun"
    launcher.parent.mkdir()
    launcher.write_text(_LAUNCHER)
    launcher.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def launched(checkout: Path, script: str, **variables: str) -> tuple[list[str], list[str]]:
    """Run a script with a torchrun that only writes down its words; (torchrun's own, the entry script's and after)."""
    python = Path(sys.executable).parent
    path = os.pathsep.join([str(checkout / "bin"), str(python), os.environ["PATH"]])
    kept = {name: value for name, value in os.environ.items() if name not in ("NNODES", "VP_SIZE", "WORLD_SIZE")}
    record = checkout / "launched"
    environment = {**kept, "PATH": path, "VIRTUAL_ENV": str(python.parent), "LAUNCHED": str(record), **variables}
    command = ["bash", str(checkout / "examples/qwen2.5vl" / script)]
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=60)
    words = record.read_text().splitlines()
    entry = next(i for i, word in enumerate(words) if word.endswith(".py"))
    return words[:entry], words[entry:]


def described(words: list[str], world_size: int) -> Namespace:
    args = parse_args(words, backends=("ptd", "fsdp2"))
    merge_mm_args(args)
    validate_args(args, world_size)
    return args


def test_all_scripts_are_there() -> None:
    assert {f"finetune_qwen2_5_vl_{size}.sh" for size in ("3b", "7b", "32b", "72b", "72b_fsdp2")} == set(SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_taken_without_a_word(checkout: Path, said: list[str], script: str) -> None:
    own, words = launched(checkout, script)
    world_size = int(own[own.index("--nproc_per_node") + 1]) * int(own[own.index("--nnodes") + 1])
    assert words[0] == "pretrain_vlm.py" and (ROOT / words[0]).is_file()
    args = described(words[1:], world_size)
    assert args.data_parallel_size * args.tensor_model_parallel_size * args.pipeline_model_parallel_size == world_size
    assert all(line.startswith("./examples/qwen2.5vl/model_") for line in said), said  # nothing about flags
    if args.use_torch_fsdp2:
        model = TransformersModelConfig.from_dict(args.mm.model)
        assert (model.freeze_vision_encoder, model.freeze_text_decoder) == (True, False)
        assert load_fsdp2_config(args.fsdp2_config_path).param_dtype == "bf16"
        return
    config = VLMModelConfig.from_dict(args.mm.model)
    hf_config = config.hf_config()
    text, vision = hf_config.text_config, hf_config.vision_config
    pipeline, virtual = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size
    assert check_pipeline_layers(config, pipeline, virtual, vision.depth, text.num_hidden_layers) == []
    assert len(config.pipeline_layers("text_decoder")[0]) == pipeline
    tensor = args.tensor_model_parallel_size
    for number in (text.num_attention_heads, text.num_key_value_heads, text.intermediate_size, text.vocab_size):
        assert number % tensor == 0
    assert vision.num_heads % tensor == 0 and vision.intermediate_size % tensor == 0
    assert config.freeze_vision_encoder and config.freeze_vision_projector and not config.freeze_text_decoder


def test_variables_of_the_environment_reach_the_launch(checkout: Path) -> None:
    variables = {"NPUS_PER_NODE": "4", "NNODES": "3", "NODE_RANK": "2", "MASTER_ADDR": "there", "MASTER_PORT": "7"}
    variables |= {"TRAIN_ITERS": "11", "LOAD_PATH": "earlier", "SAVE_PATH": "mine"}
    own, words = launched(checkout, "finetune_qwen2_5_vl_7b.sh", **variables)
    assert " ".join(own) == "--nproc_per_node 4 --nnodes 3 --node_rank 2 --master_addr there --master_port 7"
    (checkout / "earlier").mkdir()
    args = described(words[1:], 12)
    assert (args.train_iters, args.load, args.save, args.data_parallel_size) == (11, "earlier", "mine", 3)
    assert (checkout / "mine" / "train_rank2.log").is_file()


def test_the_published_numbers_are_those_of_the_sizes() -> None:
    """As many parameters as the hub's models have, counted on meta."""
    import torch
    from transformers import Qwen2_5_VLForConditionalGeneration

    expected = {"3b": 3_754_622_976, "7b": 8_292_166_656, "32b": 33_452_718_336, "72b": 73_410_777_344}
    for size, count in expected.items():
        content = json.loads((EXAMPLES / f"model_{size}.json").read_text())
        with torch.device("meta"):
            model = Qwen2_5_VLForConditionalGeneration(VLMModelConfig.from_dict(content).hf_config())
        assert sum(p.numel() for p in model.parameters()) == count, size
