"""ConfigReader, MMConfig and merge_mm_args, read_files."""

from __future__ import annotations

import argparse
import copy
import json
import pickle
from argparse import Namespace
from pathlib import Path

import pytest

from mindspeed_mm.configs.config import ConfigReader, MMConfig, merge_mm_args, mm_extra_args_provider, read_files
from mindspeed_mm.utils.errors import ConfigError

TREE = {
    "dtype": "bf16",
    "text": {"layers": [1, {"deep": {"x": None}}, [{"y": 2}]], "none": None},
    "get": "a key named like a method",
    "not an identifier": 1,
    "empty": {},
}


def reader() -> ConfigReader:
    return ConfigReader(copy.deepcopy(TREE), file="model.json")


def test_attributes_at_every_depth() -> None:
    config = reader()
    assert config.dtype == "bf16"
    assert config.text.layers[0] == 1
    assert config.text.layers[1].deep.x is None
    assert config.text.layers[2][0].y == 2
    assert config["not an identifier"] == 1 and config["get"] == TREE["get"]
    assert config.get("nothing", 5) == 5 and config.get("nothing") is None and config.text.get("none", 5) is None


def test_to_dict_gives_back_what_was_read() -> None:
    assert reader().to_dict() == TREE and json.dumps(reader().to_dict()) == json.dumps(TREE)
    inner = reader().to_dict()["text"]["layers"]
    assert type(inner[1]) is dict and type(inner[2][0]) is dict


def test_it_is_a_mapping() -> None:
    config = reader()
    assert list(config) == list(TREE) and len(config) == len(TREE) and "text" in config and "x" not in config
    assert list(config.keys()) == list(TREE) and dict(config.items())["dtype"] == "bf16"
    assert {**config}["dtype"] == "bf16" and not config.empty
    assert config == TREE and config == reader() and config != {}


def test_setting_attributes() -> None:
    config = reader()
    config.new = {"a": [{"b": 1}]}
    config["dtype"] = "fp32"
    del config.empty
    assert config.new.a[0].b == 1 and config.dtype == "fp32" and "empty" not in config
    assert config.to_dict()["new"] == {"a": [{"b": 1}]}
    assert config.update_unuse(dtype="fp16", depth=3) == {"depth": 3}
    assert config.dtype == "fp16" and "depth" not in config


def test_missing_attribute_names_file_path_and_nearest() -> None:
    with pytest.raises(AttributeError, match=r"model\.json: no key 'text\.layer'; did you mean 'layers'\?"):
        _ = reader().text.layer
    with pytest.raises(AttributeError, match=r"no key 'text\.layers\[1\]\.deeep'; did you mean 'deep'"):
        _ = reader().text.layers[1].deeep
    assert not hasattr(reader(), "nothing") and getattr(reader(), "nothing", 3) == 3
    with pytest.raises(KeyError):
        reader()["nothing"]


def test_copy_and_pickle_keep_everything() -> None:
    config = reader()
    for copied in (copy.deepcopy(config), copy.copy(config), pickle.loads(pickle.dumps(config))):
        assert copied == config and copied is not config and copied.config_file == "model.json"
        copied.text.none = 1
        assert config.text.none is None
    with pytest.raises(AttributeError):
        ConfigReader.__new__(ConfigReader).anything  # noqa: B018 - half-made, as pickle makes them


def test_repr_shows_the_content() -> None:
    assert "model.json" in repr(reader()) and "'bf16'" in repr(reader()) and "layers" in str(reader())


def test_not_an_object() -> None:
    with pytest.raises(ConfigError, match="expected an object"):
        ConfigReader([1])  # type: ignore[arg-type]


def test_mmconfig_reads_json_whole_and_yaml_by_name(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text('{"model_id": "a"}')
    (tmp_path / "both.yaml").write_text("data:\n  x: 1e-5\ntool: {}\n")
    mm = MMConfig({"model": tmp_path / "model.json", "data": str(tmp_path / "both.yaml"), "tool": ""})
    assert mm.model.model_id == "a" and mm.data.x == 1e-5 and not hasattr(mm, "tool")
    assert "model_id" in repr(mm)


def test_mmconfig_tells_the_faults_of_all_files(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text("{")
    (tmp_path / "data.yaml").write_text("modle: {}\n")
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "x.toml").write_text("")
    files = {"model": "model.json", "data": "data.yaml", "tool": "missing.json", "list": "list.json", "x": "x.toml"}
    with pytest.raises(ConfigError) as caught:
        MMConfig({name: tmp_path / file for name, file in files.items()})
    lines = str(caught.value).splitlines()
    assert len(lines) == 5
    for line, part in zip(
        lines,
        ["not JSON", "no top-level key 'data'; found modle", "does not exist", "expected an object", ".json or .yaml"],
        strict=True,
    ):
        assert part in line


def test_provider_adds_the_three_flags_once() -> None:
    parser = mm_extra_args_provider(mm_extra_args_provider(argparse.ArgumentParser()))
    args = parser.parse_args(["--mm-model", "m", "--mm-data", "d"])
    assert (args.mm_model, args.mm_data, args.mm_tool) == ("m", "d", None)


def namespace(**files: str | None) -> Namespace:
    return Namespace(**{f"mm_{name}": files.get(name) for name in ("model", "data", "tool")})


def test_merge_is_idempotent_and_leaves_raw_content(run_folder: Path) -> None:
    args = namespace(model="model.json", data="data.json", tool="tools.json")
    merge_mm_args(args)
    mm = args.mm
    merge_mm_args(args)
    assert args.mm is mm and mm.model.init_from_hf_path == "./hf"
    assert mm.data.dataset_param.dataset_type == "huggingface" and mm.tool.to_dict() == {}


def test_merge_without_files(run_folder: Path) -> None:
    args = namespace()
    merge_mm_args(args)
    assert not hasattr(args.mm, "model")


def test_merge_tells_the_faults_of_all_files(run_folder: Path) -> None:
    (run_folder / "model.json").write_text('{"init_from_hf_path": "./hf", "text_decodr": {}}')
    (run_folder / "data.json").write_text("{")
    (run_folder / "tools.json").write_text('{"profil": {}}')
    args = namespace(model="model.json", data="data.json", tool="tools.json")
    with pytest.raises(ConfigError) as caught:
        merge_mm_args(args)
    for part in ("model.json: unknown key 'text_decodr'", "data.json, line 1", "tools.json: unknown key 'profil'"):
        assert part in str(caught.value)
    assert not hasattr(args, "mm")


def test_merge_finds_missing_directories(run_folder: Path) -> None:
    (run_folder / "model.json").write_text('{"init_from_hf_path": "./hff"}')
    text = (run_folder / "data.json").read_text().replace("./hf", "/no/where")
    (run_folder / "data.json").write_text(text)
    with pytest.raises(ConfigError) as caught:
        merge_mm_args(namespace(model="model.json", data="data.json"))
    assert "'init_from_hf_path': ./hff does not exist; did you mean 'hf'?" in str(caught.value)
    assert "model_name_or_path': /no/where does not exist" in str(caught.value)


def test_merge_refuses_a_name_on_the_hub(run_folder: Path) -> None:
    (run_folder / "model.json").write_text('{"init_from_hf_path": "Qwen/Qwen2.5-VL-3B-Instruct"}')
    with pytest.raises(ConfigError, match="`hf download Qwen/"):
        merge_mm_args(namespace(model="model.json"))


def test_merge_for_a_script_of_ones_own(run_folder: Path, said: list[str]) -> None:
    (run_folder / "model.json").write_text('{"hidden": 64, "text_decodr": "small", "freeze": true}')
    (run_folder / "data.json").write_text('{"rows": "x", "dataset_parm": {}}')
    args = namespace(model="model.json", data="data.json")
    files = read_files(args, None, None).files
    assert files.model.text_decodr == "small" and files.data.rows == "x"
    assert len(said) == 2 and "'text_decoder'" in said[0] and "'dataset_param'" in said[1]
