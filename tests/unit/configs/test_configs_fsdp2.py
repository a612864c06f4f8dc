"""fsdp2.yaml: defaults, typing, and every mistake with its key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.configs.config import ConfigReader
from mindspeed_mm.configs.fsdp2_config import Fsdp2Config, load_fsdp2_config
from mindspeed_mm.utils.errors import ConfigError

# The example of the published migration guide, with the tabs that it holds after its values.
PUBLISHED = """sharding_size: auto\t
sub_modules_to_wrap:\t
  - "text_decoder.output_layer"\t
  - "text_decoder.decoder.layers.{*}"\t
param_dtype: "bf16"\t
reduce_dtype: "fp32"\t
cast_forward_inputs: True\t
ignored_modules:\t
  - "image_encoder"\t
recompute_modules:\t
  - "text_decoder.decoder.layers.{*}"\t
num_to_forward_prefetch: 2\t
num_to_backward_prefetch: 2
offload_to_cpu: False
"""


def test_defaults_are_the_published_documents() -> None:
    config = load_fsdp2_config(None)
    assert config.model_dump() == {
        "sharding_size": 1,
        "sub_modules_to_wrap": None,
        "ignored_modules": None,
        "recompute_modules": None,
        "recompute_keep": [],
        "activation_offload_modules": None,
        "chunk_mlp_tokens": None,
        "chunk_mlp_modules": None,
        "chunk_mbs_modules": None,
        "chunk_mbs_size": 1,
        "chunk_mbs_batch_dim": 0,
        "chunk_mbs_args": [0],
        "chunk_mbs_kwargs": [],
        "use_reentrant": True,
        "param_dtype": None,
        "reduce_dtype": None,
        "output_dtype": None,
        "cast_forward_inputs": True,
        "reshard_after_forward": True,
        "offload_to_cpu": False,
        "pin_memory": False,
        "num_to_forward_prefetch": None,
        "num_to_backward_prefetch": 1,
        "defer_gradient_sync": False,
        "expert_parallel_size": 1,
        "moe_modules": None,
        "reshard_local_experts": True,
        "ep_fsdp_size": None,
        "tp_colwise": None,
        "tp_rowwise": None,
        "cp_split_media": True,
        "float8_recipe": None,
        "float8_modules": None,
        "float8_all_gather": False,
        "float8_emulate": False,
        "align_fsdp_param_groups": False,
        "compile": False,
        "compile_backend": "inductor",
        "ignore_missing_modules": False,
    }


def test_published_example_with_its_tabs(tmp_path: Path, said: list[str]) -> None:
    path = tmp_path / "fsdp2.yaml"
    path.write_text(PUBLISHED)
    config = load_fsdp2_config(path)
    assert config.sharding_size == "auto" and config.param_dtype == "bf16" and config.reduce_dtype == "fp32"
    assert config.sub_modules_to_wrap == ["text_decoder.output_layer", "text_decoder.decoder.layers.{*}"]
    assert (config.num_to_forward_prefetch, config.num_to_backward_prefetch, config.offload_to_cpu) == (2, 2, False)
    assert said == []


@pytest.mark.parametrize("path", [None, ""])
def test_no_path_and_an_empty_file_mean_defaults(tmp_path: Path, path: str | None) -> None:
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    for given in (path, tmp_path / "empty.yaml"):
        assert load_fsdp2_config(given).model_dump() == Fsdp2Config().model_dump()


@pytest.mark.parametrize(
    "key, value, typed",
    [
        ("sharding_size", None, 1),
        ("sharding_size", "None", 1),
        ("sharding_size", "AUTO", "auto"),
        ("sharding_size", "4", 4),
        ("offload_to_cpu", "False", False),
        ("offload_to_cpu", "on", True),
        ("use_reentrant", 0, False),
        ("use_reentrant", None, True),
        ("reshard_after_forward", 1, True),
        ("reshard_after_forward", "false", False),
        ("reshard_after_forward", 4, 4),
        ("param_dtype", "bfloat16", "bf16"),
        ("reduce_dtype", "none", None),
        ("output_dtype", "torch.float32", "fp32"),
        ("num_to_forward_prefetch", "2", 2),
        ("sub_modules_to_wrap", "None", None),
        ("defer_gradient_sync", True, True),
    ],
)
def test_values_are_typed(key: str, value: Any, typed: Any) -> None:
    read = getattr(Fsdp2Config.from_dict({key: value}), key)
    assert read == typed and type(read) is type(typed)


@pytest.mark.parametrize(
    "key, value, parts",
    [
        ("recompute_moduls", ["a"], ["unknown key 'recompute_moduls'", "'recompute_modules'"]),
        ("sub_module_to_wrap", ["a"], ["unknown key", "'sub_modules_to_wrap'"]),
        ("fsdp", {"a": {"b": 1}}, ["unknown key 'fsdp'", "keys here"]),
        ("sharding_size", 0, ["'sharding_size' is 0", "at least 1, or auto"]),
        ("sharding_size", "all", ["'all'", "auto"]),
        ("sharding_size", True, ["true", "whole number"]),
        ("sharding_size", 2.5, ["2.5"]),
        ("offload_to_cpu", "maybe", ["'offload_to_cpu' is 'maybe'", "true or false"]),
        ("use_reentrant", 2, ["'use_reentrant' is 2", "true or false"]),
        ("reshard_after_forward", -2, ["ZeRO-3"]),
        ("reshard_after_forward", "auto", ["'auto'", "ZeRO-2"]),
        ("param_dtype", "bf17", ["'param_dtype' is 'bf17'", "bf16, fp16, fp32"]),
        ("num_to_backward_prefetch", -1, ["'num_to_backward_prefetch' is -1", "at least 0"]),
        ("num_to_backward_prefetch", "many", ["'many'", "a whole number"]),
        ("sub_modules_to_wrap", "a.b", ["'a.b'", "a list", "- a.b"]),
        ("ignored_modules", [1], ["'ignored_modules[0]' is 1", "text"]),
        ("recompute_modules", {"a": 1}, ["expected a list"]),
        ("expert_parallel_size", 0, ["'expert_parallel_size' is 0", "at least 1"]),
    ],
)
def test_mistakes(key: str, value: Any, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        Fsdp2Config.from_dict({key: value}, file="my.yaml")
    for part in ["my.yaml", *parts]:
        assert part in str(caught.value)


def test_all_faults_at_once_and_the_shape_of_the_file() -> None:
    with pytest.raises(ConfigError) as caught:
        Fsdp2Config.from_dict({"a": 1, "b": 2, "param_dtype": "x", "use_reentrant": "x"})
    assert len(str(caught.value).splitlines()) == 4
    with pytest.raises(ConfigError, match="expected an object with keys such as sharding_size"):
        Fsdp2Config.from_dict(["sharding_size"])


@pytest.mark.parametrize("key, value", [("align_fsdp_param_groups", False)])
def test_keys_without_effect_are_said_once(said: list[str], key: str, value: Any) -> None:
    for _ in range(2):
        Fsdp2Config.from_dict({key: value})
    assert len(said) == 1 and f"'{key}' has no effect here" in said[0]


def test_pin_memory_alone_is_said(said: list[str]) -> None:
    Fsdp2Config.from_dict({"pin_memory": True, "offload_to_cpu": True})
    assert said == []
    Fsdp2Config.from_dict({"pin_memory": True})
    assert len(said) == 1 and "offload_to_cpu" in said[0]


def test_it_reads_a_config_reader_and_is_frozen() -> None:
    config = Fsdp2Config.from_dict(ConfigReader({"sharding_size": 2}))
    assert config.sharding_size == 2
    with pytest.raises(Exception, match="frozen"):
        config.sharding_size = 3


@pytest.mark.parametrize(
    ("key", "value", "instead"),
    [
        ("fsdp_size", 8, "write sharding_size"),
        ("tp_size", 2, "write the flag --tensor-model-parallel-size"),
        ("tp_plan", {"colwise_parallel": ["a"]}, "write tp_colwise and tp_rowwise"),
        ("cp_size", 2, "write the flags --context-parallel-size and --context-parallel-algo"),
        ("cp_type", "ring", "ring is megatron_cp_algo"),
        ("ulysses_parallel_size", 2, "--ulysses-degree-in-cp"),
        ("ring_attention_size", 2, "--ulysses-degree-in-cp"),
        ("ep_size", 8, "write expert_parallel_size"),
        ("ep_modules", ["a"], "write moe_modules"),
        ("ep_plan", {"apply_modules": ["a"], "dispatcher": "alltoall"}, "write apply_modules as moe_modules"),
        ("expert_fully_shard_parallel_size", 2, "write ep_fsdp_size"),
        ("parallel", {"ep_size": 2}, "write its keys at the top"),
    ],
)
def test_keys_of_other_trainers_are_told_our_names(key: str, value: Any, instead: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Fsdp2Config.from_dict({key: value})
    assert "this key is of another trainer's file" in str(caught.value) and instead in str(caught.value)


def test_keys_of_other_trainers_that_change_no_number(said: list[str]) -> None:
    Fsdp2Config.from_dict({"efsdp_shard_placement_fn": "shard_by_dim_1", "ep_dispatcher": "fused"})
    assert len(said) == 2 and all("of another trainer's file: " in line for line in said)


def test_two_keys_about_the_sharding_of_experts() -> None:
    for sizes in ({"ep_fsdp_size": 2}, {"ep_fsdp_size": 1, "reshard_local_experts": False}):
        assert Fsdp2Config.from_dict(sizes).expert_sharding_size == sizes["ep_fsdp_size"]
    assert Fsdp2Config.from_dict({"reshard_local_experts": False}).expert_sharding_size == 1
    assert Fsdp2Config.from_dict({}).expert_sharding_size is None
    for size, whole in ((2, False), (1, True)):
        with pytest.raises(ConfigError, match=r"'ep_fsdp_size' is . and 'reshard_local_experts' .*; keep ep_fsdp_size"):
            Fsdp2Config.from_dict({"ep_fsdp_size": size, "reshard_local_experts": whole})


def test_keys_that_have_an_effect_give_no_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("mindspeed_mm.configs.fsdp2_config.notice", lambda text, **_: said.append(text))
    layers = ["model.layers.{*}"]
    keys = {"recompute_modules": layers, "activation_offload_modules": layers, "chunk_mbs_modules": layers}
    Fsdp2Config.from_dict(keys)
    assert said == []
    Fsdp2Config.from_dict({**keys, "align_fsdp_param_groups": True})
    assert len(said) == 1 and "align_fsdp_param_groups" in said[0]


def test_what_is_compiled() -> None:
    def compiled(**keys: Any) -> Any:
        return Fsdp2Config.from_dict(keys).with_compile().compile

    assert Fsdp2Config.from_dict({"compile": "True"}).compile is True
    assert compiled() is True and compiled(compile=["a.{*}"]) == ["a.{*}"]
    with pytest.raises(ConfigError, match=r"--torch-compile .* fsdp2.yaml: compile is false"):
        compiled(compile=False)
    with pytest.raises(ConfigError, match=r"compile.*expected true \(all blocks\), false or a list .*'- a\.b'"):
        Fsdp2Config.from_dict({"compile": "a.b"})
    with pytest.raises(ConfigError, match=r"compile_backend.*inductor.*aot_eager"):
        Fsdp2Config.from_dict({"compile_backend": "eager"})
