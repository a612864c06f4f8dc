"""Cases of the kind Configuration: values and keys of hand-written files that other trainers got wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import nn

from mindspeed_mm.configs.arguments import parse_args
from mindspeed_mm.configs.config import merge_mm_args
from mindspeed_mm.configs.data_config import DataConfig
from mindspeed_mm.configs.fsdp2_config import Fsdp2Config, load_fsdp2_config
from mindspeed_mm.configs.model_config import TransformersModelConfig
from mindspeed_mm.models.common.base_model import FSDP2Mixin
from mindspeed_mm.utils.errors import ConfigError


def yaml_file(folder: Path, text: str) -> Path:
    path = folder / "fsdp2.yaml"
    path.write_text(text)
    return path


def data_json(**basic: object) -> dict[str, object]:
    return {
        "dataset_param": {
            "dataset_type": "huggingface",
            "basic_parameters": {"dataset": "rows.json", **basic},
            "preprocess_parameters": {"model_name_or_path": "hf"},
        }
    }


@pytest.mark.parametrize("written, number", [("1e-5", 1e-5), ("1e-08", 1e-8), ("1E5", 1e5), ("1.0e-5", 1e-5)])
def test_c01_numbers_without_a_dot(tmp_path: Path, written: str, number: float) -> None:
    """C01: `lr: 1e-5`, `adam_epsilon: 1e-08`, `1E5` are numbers, in flags, YAML and JSON text alike."""
    (tmp_path / "model.yaml").write_text(
        f"model:\n  init_from_hf_path: {tmp_path}\n  loss_cfg:\n    router_aux_loss_coef: {written}\n"
    )
    words = f"--mm-model {tmp_path}/model.yaml --lr {written} --adam-eps {written} --micro-batch-size 1 --train-iters 1"
    args = parse_args(words.split(), required=("lr",))
    merge_mm_args(args)
    found = args.mm.model.loss_cfg.router_aux_loss_coef
    assert (args.lr, args.adam_eps) == (number, number) and found == number and isinstance(found, float)
    quoted = TransformersModelConfig.from_dict(
        {"init_from_hf_path": "hf", "loss_cfg": {"router_aux_loss_coef": written}}
    )
    assert quoted.loss_cfg.router_aux_loss_coef == number


def test_c01_text_where_a_number_is_expected_names_the_key(tmp_path: Path) -> None:
    """C01: what can't be a number is refused, with the key."""
    with pytest.raises(ConfigError, match=r"'num_to_forward_prefetch' is 'two'; expected a whole number"):
        load_fsdp2_config(yaml_file(tmp_path, "num_to_forward_prefetch: two\n"))
    with pytest.raises(ConfigError, match=r"val_rate' is '1e-'; expected a number"):
        DataConfig.from_dict(data_json(val_rate="1e-"))


def test_c02_the_word_none_is_null(tmp_path: Path) -> None:
    """C02: the word None is null, never a path or a choice."""
    config = load_fsdp2_config(yaml_file(tmp_path, "reduce_dtype: None\nignored_modules: None\nsharding_size: none\n"))
    assert (config.reduce_dtype, config.ignored_modules, config.sharding_size) == (None, None, 1)
    basic = DataConfig.from_dict(data_json(template="None", max_samples="null")).dataset_param.basic_parameters
    assert basic.template is None and basic.max_samples is None
    with pytest.raises(ConfigError, match="'init_from_hf_path' is missing"):
        TransformersModelConfig.from_dict({"init_from_hf_path": "None"})
    assert parse_args(["--load", "None", "--train-iters", "1"], required=()).load is None


@pytest.mark.parametrize(
    "written, value",
    [('"False"', False), ("False", False), ("0", False), ("off", False), ("1", True), ('"on"', True), ("yes", True)],
)
def test_c02_ways_to_write_a_boolean(tmp_path: Path, written: str, value: bool) -> None:
    """C02: `offload_to_cpu: "False"` is false; True, 1 and on are true."""
    assert load_fsdp2_config(yaml_file(tmp_path, f"offload_to_cpu: {written}\n")).offload_to_cpu is value


@pytest.mark.parametrize("written", ["2", "maybe", "[]", "1.0", '"None!"'])
def test_c02_anything_else_is_refused(tmp_path: Path, written: str) -> None:
    """C02: what is no clear boolean is refused, with file and key."""
    with pytest.raises(ConfigError, match=r"fsdp2\.yaml: 'offload_to_cpu' is .*; expected true or false"):
        load_fsdp2_config(yaml_file(tmp_path, f"offload_to_cpu: {written}\n"))


class Own(nn.Module, FSDP2Mixin):
    """A user's own model."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(2, 2) for _ in range(2))})


def test_c05_all_patterns_that_match_nothing_are_named_with_file_and_key(tmp_path: Path) -> None:
    """C05: one error names every entry of every list, before ranks or devices are asked for anything."""
    wrong = {
        "sub_modules_to_wrap": ["model.layer.{*}", "model.layers.{*}"],
        "recompute_modules": ["layers.{0-1}", "model.layers.{0-7}"],
        "ignored_modules": ["modle"],
    }
    file = yaml_file(tmp_path, json.dumps(wrong))
    with pytest.raises(ConfigError) as caught:
        Own().fully_shard(fsdp2_config_path=str(file))
    assert str(caught.value).splitlines() == [
        f"{file}: ignored_modules: entry 'modle' matches nothing: the model has no 'modle'; there is: model; did you "
        "mean 'model'?",
        f"{file}: recompute_modules: entry 'layers.{{0-1}}' matches nothing: the model has no 'layers'; there is: "
        "model; did you mean 'model.layers.{0-1}'?",
        f"{file}: recompute_modules: entry 'model.layers.{{0-7}}' names index 2, but 'model.layers' has 2 elements "
        "(0-1)",
        f"{file}: sub_modules_to_wrap: entry 'model.layer.{{*}}' matches nothing: 'model' has no 'layer'; there is: "
        "layers; did you mean 'model.layers.{*}'?",
    ]


def test_c04_misspelt_keys_are_errors_with_the_nearest_name(tmp_path: Path) -> None:
    """C04: a misspelt key is never a loose attribute: not in YAML, not in JSON, not as a flag."""
    with pytest.raises(ConfigError, match=r"fsdp2\.yaml: unknown key 'recompute_moduls'.*'recompute_modules'"):
        load_fsdp2_config(yaml_file(tmp_path, "recompute_moduls: [a]\n"))
    with pytest.raises(ConfigError, match=r"unknown flag '--grad-clip'; did you mean '--clip-grad'"):
        parse_args(["--grad-clip", "1"])
    with pytest.raises(ConfigError, match=r"unknown flag '--max-grad-norm'; did you mean '--clip-grad'"):
        parse_args(["--max-grad-norm", "1"])
    with pytest.raises(ConfigError, match=r"unknown key 'dataset_param\.basic_parameters\.templat'.*'template'"):
        DataConfig.from_dict(data_json(templat="qwen2vl"))


def test_c04_an_extra_nested_object_is_an_error(tmp_path: Path) -> None:
    """C04: an object that nobody asked for is an error too, in each file."""
    with pytest.raises(ConfigError, match="unknown key 'optimizer'"):
        Fsdp2Config.from_dict({"optimizer": {"lr": 1}})
    model = {"init_from_hf_path": str(tmp_path), "training": {"lr": 1e-5}}
    (tmp_path / "model.json").write_text(json.dumps(model))
    args = parse_args(["--mm-model", str(tmp_path / "model.json"), "--train-iters", "1"], required=())
    with pytest.raises(ConfigError, match=r"model\.json: unknown key 'training'"):
        merge_mm_args(args)
