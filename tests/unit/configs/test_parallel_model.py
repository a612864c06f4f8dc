"""What the files tell about a model that a layout can't split: refused before torch is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.configs.describe import describe
from mindspeed_mm.configs.dims import Dims
from mindspeed_mm.configs.fsdp2_config import Fsdp2Config
from mindspeed_mm.configs.global_args import get_args
from mindspeed_mm.configs.parallel_model import TextNumbers, check_text_numbers, log_idle_parallel_keys
from mindspeed_mm.configs.run import Run
from mindspeed_mm.tasks.train.language import TRANSFORMERS
from mindspeed_mm.utils.errors import ConfigError

DENSE = {"model_type": "qwen3", "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944}
DENSE |= {"vocab_size": 152064, "attention_dropout": 0.1}
EXPERTS = {"num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 151936, "intermediate_size": 7}


def problems(folder: Path, config: dict[str, Any], dims: Dims, **fsdp2: Any) -> list[str]:
    (folder / "config.json").write_text(json.dumps(config))
    return check_text_numbers(TextNumbers.read(str(folder)), dims, Fsdp2Config.from_dict(fsdp2))


@pytest.mark.parametrize(
    ("config", "dims", "parts"),
    [
        (DENSE, Dims(ulysses=8), ["config.json: 'num_attention_heads': 28 attention heads", "Ulysses ranks", "ring 2"]),
        ({"text_config": DENSE}, Dims(ulysses=8), ["'text_config.num_attention_heads': 28 attention heads"]),
        ({"thinker_config": {"text_config": DENSE}}, Dims(ring=2), ["'thinker_config.text_config.attention_dropout'"]),
        (DENSE, Dims(dp=2, ep=2), ["config.json: there are no experts to be split over 2"]),
        (DENSE, Dims(tp=8), ["28 attention heads can't be", "4 key-value heads can't be"]),
        ({**DENSE, "vocab_size": 151, "intermediate_size": 5}, Dims(tp=2), ["5 features of the MLP", "151 tokens of"]),
        ({**EXPERTS, "num_experts": 12}, Dims(dp=8, ep=8), ["'num_experts': 12 experts can't be", "here: 1, 2, 4"]),
        ({**EXPERTS, "n_routed_experts": 12}, Dims(dp=8, ep=8), ["'n_routed_experts': 12 experts"]),
        (
            {"text_config": {**EXPERTS, "num_local_experts": 3}},
            Dims(dp=2, ep=2),
            ["'text_config.num_local_experts': 3"],
        ),
    ],
)
def test_numbers_that_do_not_fit(tmp_path: Path, config: dict[str, Any], dims: Dims, parts: list[str]) -> None:
    found = problems(tmp_path, config, dims)
    text = "\n".join(found)
    assert all(part in text for part in parts), text


@pytest.mark.parametrize(
    ("config", "dims", "fsdp2"),
    [
        (DENSE, Dims(dp=2, ulysses=4, tp=1), {}),
        (DENSE, Dims(tp=4), {}),
        (DENSE, Dims(tp=8), {"tp_colwise": ["a"], "tp_rowwise": ["b"]}),
        ({**EXPERTS, "num_experts": 128}, Dims(dp=2, tp=4, ep=8), {}),
        ({"model_type": "mixtral"} | EXPERTS | {"num_experts_per_tok": 2}, Dims(dp=2, ep=2), {}),  # by its class
        ({}, Dims(ring=2, ulysses=2, tp=2, ep=2), {}),
    ],
)
def test_numbers_that_fit_or_are_not_told(tmp_path: Path, config: Any, dims: Dims, fsdp2: dict[str, Any]) -> None:
    assert problems(tmp_path, config, dims, **fsdp2) == []


def test_a_directory_without_a_readable_config_is_left_to_its_own_check(tmp_path: Path) -> None:
    numbers = TextNumbers.read(str(tmp_path))
    assert not numbers.sections and not check_text_numbers(numbers, Dims(ulysses=3, ep=3), Fsdp2Config())


LAUNCH = (
    "--use-torch-fsdp2 --mm-model model.json --mm-data data.json --micro-batch-size 1 --lr 1 --train-iters 1 --dry-run"
)


def run(words: str, world_size: int, model: dict[str, Any] | None = None) -> Run:
    Path("model.json").write_text(json.dumps({"init_from_hf_path": "./hf", **(model or {})}))
    Path("hf/config.json").write_text(json.dumps(DENSE))
    return describe(f"{LAUNCH} --world-size {world_size} {words}".split(), TRANSFORMERS)


def test_a_launch_is_refused_by_its_files(run_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"hf/config.json: 'num_attention_heads': 28 .* Ulysses"):
        run("--context-parallel-size 8", 8)
    sizes = {"text_decoder": {"context_parallel_size": 2, "tensor_model_parallel_size": 1}}
    with pytest.raises(ConfigError, match=r"model.json: 'text_decoder.context_parallel_size' is 2, and --context-par"):
        run("--context-parallel-size 4", 4, sizes)
    assert run("--context-parallel-size 2", 4, sizes).dims == Dims(dp=2, ulysses=2)


def test_scripts_read_the_number_of_expert_ranks_that_the_file_states(run_folder: Path, said: list[str]) -> None:
    assert run("", 4).parallel.expert_model_parallel_size == 1
    assert get_args().expert_model_parallel_size == 1
    assert said == []


def test_keys_of_a_parallelism_that_is_not_asked_for(said: list[str]) -> None:
    config = Fsdp2Config.from_dict({"moe_modules": ["a"], "reshard_local_experts": True, "tp_colwise": ["b"]})
    log_idle_parallel_keys(Dims(ulysses=2, tp=2, ep=2), config)
    assert said == []
    log_idle_parallel_keys(Dims(), config)
    assert said == [
        "fsdp2.yaml: 'moe_modules' and 'reshard_local_experts' have no effect here: expert_parallel_size is 1",
        "fsdp2.yaml: 'tp_colwise' has no effect here: --tensor-model-parallel-size is 1",
    ]


WITHOUT_TORCH = """
import sys
from mindspeed_mm.configs.describe import describe
from mindspeed_mm.tasks.train.language import TRANSFORMERS
from mindspeed_mm.utils.errors import ConfigError
try:
    describe(sys.argv[1].split(), TRANSFORMERS)
except ConfigError as error:
    print(error)
print("torch" in sys.modules)
"""


def test_torch_is_not_imported(run_folder: Path) -> None:
    (run_folder / "hf" / "config.json").write_text(json.dumps(DENSE))
    words = f"{LAUNCH} --world-size 8 --expert-model-parallel-size 8"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    command = [sys.executable, "-c", WITHOUT_TORCH, words]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60, check=True)
    lines = done.stdout.splitlines()
    assert "hf/config.json: there are no experts" in lines[-2] and lines[-1] == "False"
