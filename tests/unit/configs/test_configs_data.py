"""data.json: published examples, defaults, typing, and every mistake with its key."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from mindspeed_mm.configs.config import ConfigReader
from mindspeed_mm.configs.data_config import DataConfig, DataloaderParam, DatasetParam, warn_of_near_data_keys
from mindspeed_mm.utils.errors import ConfigError

# Keys and values of a published data.json for image questions.
PUBLISHED: dict[str, Any] = {
    "dataset_param": {
        "dataset_type": "huggingface",
        "preprocess_parameters": {
            "model_name_or_path": "./ckpt/hf_path/Qwen2.5-VL-7B-Instruct",
            "use_fast_tokenizer": True,
            "split_special_tokens": False,
            "image_max_pixels": 262144,
            "image_min_pixels": 1024,
            "video_max_pixels": 16384,
            "video_min_pixels": 0,
            "video_fps": 2.0,
            "video_maxlen": 64,
        },
        "basic_parameters": {
            "template": "qwen2vl",
            "dataset_dir": "./data",
            "dataset": "./data/mllm_format_llava_instruct_data.json",
            "cache_dir": "./data/cache_dir",
            "train_on_prompt": False,
            "mask_history": False,
            "preprocessing_batch_size": 1000,
            "preprocessing_num_workers": 16,
            "max_samples": None,
            "tool_format": None,
            "overwrite_cache": False,
        },
        "attr": {
            "system": None,
            "images": "images",
            "videos": None,
            "messages": "messages",
            "role_tag": "role",
            "content_tag": "content",
            "user_tag": "user",
            "assistant_tag": "assistant",
            "observation_tag": None,
            "function_tag": None,
            "system_tag": None,
        },
    },
    "dataloader_param": {
        "dataloader_mode": "sampler",
        "drop_last": True,
        "sampler_type": "BaseRandomBatchSampler",
        "collate_param": {"model_name": "qwen2vl", "ignore_pad_token_for_loss": True},
        "pin_memory": True,
        "shuffle": None,
    },
}
BASIC = "dataset_param.basic_parameters"
PREPROCESS = "dataset_param.preprocess_parameters"


def changed(path: str, value: Any) -> dict[str, Any]:
    """The published file with one key set (`...` deletes it)."""
    data = copy.deepcopy(PUBLISHED)
    *parents, name = path.split(".")
    place = data
    for parent in parents:
        place = place.setdefault(parent, {})
    if value is ...:
        del place[name]
    else:
        place[name] = value
    return data


def read(config: DataConfig, path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def test_published_file(said: list[str]) -> None:
    config = DataConfig.from_dict(ConfigReader(PUBLISHED, file="data.json"))
    assert read(config, f"{BASIC}.dataset") == ["./data/mllm_format_llava_instruct_data.json"]
    assert read(config, f"{PREPROCESS}.image_max_pixels") == 262144
    assert read(config, "dataset_param.attr.messages") == "messages"
    assert read(config, "dataset_param.attr.observation_tag") is None
    assert config.dataloader_param.shuffles and config.dataloader_param.pin_memory
    assert len(said) == 1
    assert said[0].startswith(f"data.json: no effect here: {BASIC}.preprocessing_batch_size: ")
    basic = config.dataset_param.basic_parameters
    assert (basic.cache_dir, basic.preprocessing_num_workers, basic.overwrite_cache) == ("./data/cache_dir", 16, False)


def test_defaults_are_the_published_ones() -> None:
    config = DataConfig.from_dict(
        {
            "dataset_param": {
                "dataset_type": "huggingface",
                "basic_parameters": {"dataset": "a.json"},
                "preprocess_parameters": {"model_name_or_path": "hf"},
            }
        }
    )
    attr, basic = config.dataset_param.attr, config.dataset_param.basic_parameters
    assert (attr.messages, attr.role_tag, attr.content_tag) == ("conversations", "from", "value")
    assert (attr.user_tag, attr.assistant_tag, attr.formatting) == ("human", "gpt", "sharegpt")
    assert (attr.observation_tag, attr.function_tag, attr.system_tag) == ("observation", "function_call", "system")
    assert (basic.dataset_dir, basic.template, basic.enable_thinking) == ("data", None, True)
    assert (basic.train_on_prompt, basic.mask_history, basic.max_samples) == (False, False, None)
    preprocess = config.dataset_param.preprocess_parameters
    assert preprocess.image_max_pixels is None and preprocess.video_fps is None  # the processor's own
    assert config.dataloader_param.drop_last and config.dataloader_param.shuffles


@pytest.mark.parametrize(
    "path, value, typed",
    [
        (f"{BASIC}.dataset", "a.json, b.json", ["a.json", "b.json"]),
        (f"{BASIC}.dataset", ["a.json"], ["a.json"]),
        (f"{BASIC}.max_samples", -1, None),
        (f"{BASIC}.max_samples", "None", None),
        (f"{BASIC}.max_samples", 10000, 10000),
        (f"{BASIC}.mask_history", "False", False),
        (f"{BASIC}.mask_history", None, False),
        (f"{BASIC}.val_max_samples", 0, 0),
        (f"{BASIC}.val_rate", "0.1", 0.1),
        (f"{BASIC}.val_dataset", "v.json", ["v.json"]),
        (f"{BASIC}.cutoff_len", 1024, 1024),
        (f"{PREPROCESS}.image_max_pixels", "262144", 262144),
        (f"{PREPROCESS}.image_max_pixels", None, None),
        (f"{BASIC}.dataset", "a.json, name", ["a.json", "name"]),
        (f"{BASIC}.dataset", {"file_name": "a.json"}, [{"file_name": "a.json"}]),
        (f"{BASIC}.dataset", [{"file_name": "a.json"}, "b"], [{"file_name": "a.json"}, "b"]),
        (f"{BASIC}.val_dataset", {"file_name": "a.json"}, [{"file_name": "a.json"}]),
        (f"{BASIC}.stage", "pretrain", "pretrain"),
        (f"{BASIC}.stage", None, "sft"),
        (f"{BASIC}.interleave_probs", "0.5, 0.5", [0.5, 0.5]),
        (f"{BASIC}.packing", "True", True),
        (f"{BASIC}.streaming", True, True),
        (f"{BASIC}.on_bad_sample", "skip", "skip"),
        ("dataset_param.attr.ranking", True, True),
        ("dataset_param.attr.pretrain", "true", True),
        ("dataset_param.attr.formatting", "openai", "openai"),
        ("dataset_param.attr.formatting", "multimodal_tool", "multimodal_tool"),
        ("dataset_param.attr.images", "None", None),
        ("dataset_param.attr.formatting", "alpaca", "alpaca"),
        ("dataloader_param.shuffle", "false", False),
        ("dataloader_param.collate_param.pad_to_multiple_of", 8, 8),
        ("dataloader_param.sampler_type", "stateful_distributed_sampler", "stateful_distributed_sampler"),
    ],
)
def test_values_are_typed(path: str, value: Any, typed: Any) -> None:
    found = read(DataConfig.from_dict(changed(path, value)), path)
    assert found == typed and type(found) is type(typed)


def test_a_dataset_type_with_the_same_rows(said: list[str]) -> None:
    config = DataConfig.from_dict(changed("dataset_param.dataset_type", "qwen3_asr"))
    assert config.dataset_param.dataset_type == "huggingface"
    assert "'dataset_param.dataset_type' qwen3_asr: rows are read as those of huggingface" in said[0]


def test_sequential_order() -> None:
    config = DataConfig.from_dict(changed("dataloader_param.sampler_type", "SequentialSampler"))
    assert not config.dataloader_param.shuffles


@pytest.mark.parametrize(
    "path, value, parts",
    [
        (f"{BASIC}.max_sampels", 3, [f"unknown key '{BASIC}.max_sampels'", "'max_samples'"]),
        (
            "dataset_param.template",
            "qwen2vl",
            ["unknown key 'dataset_param.template'", f"belongs at '{BASIC}.template'"],
        ),
        ("dataset_parm", {"x": 1}, ["unknown key 'dataset_parm'", "'dataset_param'"]),
        ("dataset_param.attr.message", "m", ["unknown key 'dataset_param.attr.message'", "'messages'"]),
        ("dataloader_param.colate_param", {}, ["unknown key 'dataloader_param.colate_param'", "'collate_param'"]),
        ("dataset_param.tokenizer_config", {"use_fst": 1}, ["unknown key 'dataset_param.tokenizer_config.use_fst'"]),
        (f"{BASIC}.max_samples", 0, [f"'{BASIC}.max_samples' is 0", "null or -1"]),
        (f"{BASIC}.mask_history", "nein", [f"'{BASIC}.mask_history' is 'nein'", "true or false"]),
        (f"{BASIC}.dataset", ..., [f"key '{BASIC}.dataset' is missing", "data file"]),
        (f"{BASIC}.dataset", [], [f"'{BASIC}.dataset' is []", "a path or a name"]),
        (f"{BASIC}.dataset", "a.json,,b.json", ["separated by commas"]),
        (f"{BASIC}.val_rate", 1.5, [f"'{BASIC}.val_rate' is 1.5", "less than 1"]),
        (f"{BASIC}.template", 3, [f"'{BASIC}.template' is 3", "text"]),
        (f"{PREPROCESS}", ..., [f"key '{PREPROCESS}' is missing"]),
        (f"{PREPROCESS}", None, [f"'{PREPROCESS}' is null", "an object"]),
        (f"{PREPROCESS}.model_name_or_path", ..., ["model_name_or_path' is missing", "processor"]),
        (f"{PREPROCESS}.video_fps", 0, ["'dataset_param.preprocess_parameters.video_fps' is 0", "more than 0"]),
        (f"{PREPROCESS}.image_max_pixels", "many", ["'many'", "a whole number"]),
        ("dataset_param.dataset_type", "hugingface", ["'hugingface'", "did you mean 'huggingface'"]),
        ("dataset_param.attr.formatting", "opnai", ["'opnai'", "did you mean 'openai'"]),
        (f"{BASIC}.mix_strategy", "interleave", ["'interleave'", "interleave_under"]),
        (f"{BASIC}.interleave_probs", "0.5,x", ["numbers above 0"]),
        (f"{BASIC}.on_bad_sample", "ignore", ["raise, skip"]),
        (f"{BASIC}.dataset", [3], ["a list of them"]),
        ("dataloader_param.sampler_type", "AESampler", ["'AESampler'", "not there yet"]),
        ("dataloader_param.sampler_type", "BaseRandomBatchSample", ["did you mean 'BaseRandomBatchSampler'"]),
        ("dataloader_param.collate_param.model_name", "qwen2_vl", ["'qwen2_vl'", "'qwen2vl'"]),
        ("dataloader_param.collate_param", 3, ["'dataloader_param.collate_param' is 3", "an object"]),
        ("dataloader_param.collate_param.collator_id", "internvl", ["'internvl'", "'qwen2vl'", "keep one"]),
        ("dataloader_param.dataloader_mode", "variable", ["'variable'", "not there yet"]),
        ("dataloader_param.drop_last", 2, ["'dataloader_param.drop_last' is 2", "true or false"]),
        (f"{BASIC}.stage", "rm", [f"'{BASIC}.stage' is 'rm'", "not there yet", "sft, pretrain"]),
        (f"{BASIC}.use_pmcc_data", True, ["use_pmcc_data"]),
        ("val_dataset_param", {"basic_parameters": {"dataset": "v.json"}}, [f"{BASIC}.val_dataset"]),
    ],
)
def test_mistakes(path: str, value: Any, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        DataConfig.from_dict(changed(path, value), file="my/data.json")
    for part in ["my/data.json: ", *parts]:
        assert part in str(caught.value)


def test_conflicts() -> None:
    data = changed(f"{BASIC}.val_rate", 0.1)
    data["dataset_param"]["basic_parameters"]["val_dataset"] = "v.json"
    with pytest.raises(ConfigError, match=r"basic_parameters: 'val_dataset' and 'val_rate' 0\.1"):
        DataConfig.from_dict(data)
    data = changed("dataloader_param.sampler_type", "SequentialSampler")
    data["dataloader_param"]["shuffle"] = True
    with pytest.raises(ConfigError, match="'sampler_type' is 'SequentialSampler' and 'shuffle' is true"):
        DataConfig.from_dict(data)


def test_off_values_of_refused_keys_are_fine(said: list[str]) -> None:
    DataConfig.from_dict(changed(f"{BASIC}.use_pmcc_data", False))
    DataConfig.from_dict(changed(f"{BASIC}.chat_template", None))


def test_all_faults_of_the_file_come_together() -> None:
    data = changed(f"{BASIC}.max_sampels", 3)
    data["dataloader_param"]["drop_last"] = "x"
    data["dataset_param"]["attr"]["formatting"] = "x"
    with pytest.raises(ConfigError) as caught:
        DataConfig.from_dict(data)
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("dataset_type", "script"),
    [
        ("t2v", "belongs to pretrain_sora.py"),
        ("i2v", "belongs to pretrain_sora.py"),
        ("bagel", "is not there yet: it belongs to pretrain_omni.py"),
        ("FunASR", "is not there yet"),
    ],
)
def test_other_dataset_types_after_their_keys(dataset_type: str, script: str) -> None:
    data = {"dataset_param": {"dataset_type": dataset_type, "basic_parameters": {"data_path": "x", "data_folder": "y"}}}
    with pytest.raises(ConfigError, match=f"'{dataset_type}'; this dataset type {script}"):
        DataConfig.from_dict(data)
    data["dataset_param"]["basic_parameters"]["data_pth"] = 1
    with pytest.raises(ConfigError, match=r"basic_parameters\.data_pth.*'data_path'"):
        DataConfig.from_dict(data)
    data["dataset_param"]["basic_parameters"] = [{"data_path": "x", "repeat_time": 1}]  # several data sets in a list
    with pytest.raises(ConfigError, match=f"this dataset type {script}"):
        DataConfig.from_dict(data)


MULTIMODAL = {
    "dataset_param": {
        "dataset_type": "multimodal",
        "basic_parameters": {"data_path": "rows.jsonl", "data_folder": "pictures", "repeat_time": 2},
        "preprocess_parameters": {},
        "tokenizer_config": {"from_pretrained": "hf", "hub_backend": "hf"},
        "template_name": "internvl2_5",
        "max_dynamic_patch": 12,
        "attr": {"images": "picture"},
    }
}


def test_multimodal_is_written_in_the_other_words(said: list[str]) -> None:
    param = DataConfig.from_dict(MULTIMODAL).dataset_param
    entry = param.basic_parameters.dataset[0]
    assert (entry["file_name"], entry["media_dir"], entry["repeat_time"]) == ("rows.jsonl", "pictures", 2)
    assert (entry["columns"]["images"], entry["columns"]["videos"]) == ("picture", "video")
    assert param.preprocess_parameters.model_name_or_path == "hf"
    assert any("template_name" in line and "processor and chat template decide" in line for line in said)
    assert any("tokenizer_config.hub_backend" in line for line in said)
    assert not any("from_pretrained" in line for line in said)  # it has an effect
    several = copy.deepcopy(MULTIMODAL)
    several["dataset_param"]["basic_parameters"] = [{"data_path": "a"}, {"data_path": "b", "max_samples": 5}]
    entries = DatasetParam.from_dict(several["dataset_param"]).basic_parameters.dataset
    assert [(item["file_name"], item.get("num_samples")) for item in entries] == [("a", None), ("b", 5)]


@pytest.mark.parametrize(
    "basic, parts",
    [
        ([{"data_path": "a", "repeat_tim": 1}], ["basic_parameters[0].repeat_tim'", "did you mean 'repeat_time'"]),
        ([{"data_folder": "a"}], ["basic_parameters[0]'", "an object with data_path"]),
        ({"data_path": "a", "data_foldr": "b"}, ["basic_parameters.data_foldr'", "'data_folder'"]),
        (None, ["basic_parameters' is null", "data_path"]),
    ],
)
def test_mistakes_in_multimodal(basic: Any, parts: list[str]) -> None:
    data = copy.deepcopy(MULTIMODAL)
    data["dataset_param"]["basic_parameters"] = basic
    with pytest.raises(ConfigError) as caught:
        DataConfig.from_dict(data)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "path, value, why",
    [
        ("dataloader_param.num_workers", 8, "--num-workers"),
        ("dataloader_param.batch_size", 1, "--micro-batch-size"),
        ("dataloader_param.seed", 42, "--seed"),
        ("dataloader_param.initial_global_step_for_sampler", 0, "consumed samples"),
        ("dataset_param.tokenizer_config", {"from_pretrained": "x"}, "model_name_or_path"),
        ("dataset_param.use_text_processer", True, "rows always become tokens"),
        (f"{PREPROCESS}.image_resolution", 512, "image_max_pixels"),
    ],
)
def test_published_keys_without_effect(said: list[str], path: str, value: Any, why: str) -> None:
    DataConfig.from_dict(changed(path, value))
    lines = [line for line in said if path in line]
    assert len(lines) == 1 and why in lines[0]


def test_a_script_with_its_own_data(said: list[str]) -> None:
    warn_of_near_data_keys({"rows": 1, "dataset_param": {"attrr": {}}}, "d.json")
    assert len(said) == 1 and "'dataset_param.attrr'" in said[0] and "'dataset_param.attr'" in said[0]


def test_parts_alone(said: list[str]) -> None:
    whole = DataConfig.from_dict(ConfigReader(PUBLISHED, file="data.json"))
    before = list(said)
    reader = ConfigReader(PUBLISHED, file="data.json")
    dataset_param = DatasetParam.from_dict(reader.dataset_param)
    loader_param = DataloaderParam.from_dict(reader.dataloader_param)
    assert (dataset_param, loader_param) == (whole.dataset_param, whole.dataloader_param)
    assert said == before  # what was said of the whole file isn't said again
    assert DatasetParam.from_dict(dataset_param) is dataset_param and DataConfig.from_dict(whole) is whole
    with pytest.raises(ConfigError, match=r"data\.json: unknown key 'attrr'.*'attr'"):
        DatasetParam.from_dict({**PUBLISHED["dataset_param"], "attrr": {}})
    with pytest.raises(ConfigError, match=r"'dataset_param\.dataset_type' is 't2v'; this dataset type belongs to"):
        DatasetParam.from_dict({"dataset_type": "t2v", "basic_parameters": {"data_path": "x"}})
    with pytest.raises(ConfigError, match=r"'dataset_param\.basic_parameters\.use_pmcc_data' is true"):
        DatasetParam.from_dict(changed(f"{BASIC}.use_pmcc_data", True)["dataset_param"])
