"""A model that hears, in a launch that asks for the Megatron backend."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from mindspeed_mm.configs.arguments import parse_args, validate_args
from mindspeed_mm.configs.flags.spec import BACKENDS
from mindspeed_mm.configs.fsdp2_config import load_fsdp2_config

Described = Callable[..., Any]


@pytest.fixture
def described(tmp_path: Path) -> Described:
    """Reads a launch of a model with these keys and words."""

    def describe(keys: dict[str, Any], *words: str, suffix: str = ".json", **options: Any) -> Any:
        model, data, wrap = tmp_path / f"model{suffix}", tmp_path / "data.json", tmp_path / "fsdp2.yaml"
        model.write_text(json.dumps(keys) if suffix == ".json" else yaml.safe_dump({"model": keys}))
        data.write_text("{}")
        wrap.write_text("sharding_size: 2\n")
        needed = ["--mm-model", str(model), "--mm-data", str(data), "--micro-batch-size", "1", "--lr", "1e-5"]
        named = [word.replace("FSDP2_YAML", str(wrap)) for word in words]
        args = parse_args([*needed, "--train-iters", "3", *named], **{"backends": BACKENDS, **options})
        validate_args(args, 8)
        return args

    return describe


HEARS = {"audio_encoder": {"audio_encoder": {"model_id": "qwen_omni"}}}
SPLIT = ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2")


@pytest.mark.parametrize("suffix", [".json", ".yaml"])
def test_fsdp2_takes_its_place(described: Described, said: list[str], suffix: str) -> None:
    args = described(HEARS, *SPLIT, suffix=suffix)
    assert args.use_torch_fsdp2 and args.data_parallel_size == 8
    assert load_fsdp2_config(args.fsdp2_config_path).sharding_size == "auto"
    (line,) = [line for line in said if "implied" in line]
    assert "'audio_encoder' is not there on the Megatron backend" in line
    assert "--tensor-model-parallel-size 2 becomes 1; --pipeline-model-parallel-size 2 becomes 1" in line


def test_an_fsdp2_yaml_that_is_given_decides(described: Described) -> None:
    args = described(HEARS, "--fsdp2-config-path", "FSDP2_YAML")
    assert args.use_torch_fsdp2 and load_fsdp2_config(args.fsdp2_config_path).sharding_size == 2


@pytest.mark.parametrize(
    ("keys", "options"),
    [({}, {}), ({"audio_encoder": None}, {}), (HEARS, {"own_model": True}), (HEARS, {"backends": ("ptd",)})],
    ids=["silent", "null", "a model of the script's own", "a script without FSDP2"],
)
def test_other_launches_keep_their_backend(
    described: Described, said: list[str], keys: dict[str, Any], options: dict[str, Any]
) -> None:
    args = described(keys, *SPLIT, **options)
    assert not args.use_torch_fsdp2 and args.data_parallel_size == 2 and not any("implied" in line for line in said)
