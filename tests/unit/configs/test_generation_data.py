"""data.json of generation models: published files are taken, and faults are said with what to write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.configs.data_config import DataConfig
from mindspeed_mm.configs.generation_data import GenerationDataConfig, is_generation_data
from mindspeed_mm.configs.generation_steps import fixed_size, read_steps
from mindspeed_mm.utils.errors import ConfigError

PRE, BASIC = "dataset_param.preprocess_parameters", "dataset_param.basic_parameters"
#: parameters of each step as published files give them
STEPS: dict[str, dict[str, Any]] = {
    "ResizeVideo": {
        "transform_size": "auto",
        "mode": "shortside",
        "interpolation_mode": "bilinear",
        "antialias": True,
        "align_corners": False,
    },
    "CenterCropResizeVideo": {
        "transform_size": {"max_height": 480, "max_width": 832},
        "interpolation_mode": "bicubic",
        "antialias": False,
        "align_corners": False,
        "use_short_edge": False,
        "top_crop": False,
    },
    "ResizeCropVideo": {"size": "auto", "interpolation_mode": "bilinear"},
    "ToTensorVideo": {},
    "norm_fun": {"mean": 0.5, "std": 0.5},
    "Pad2Square": {"mean": [0.485, 0.456, 0.406]},
    "Resize": {"size": [448, 448], "interpolation": "BICUBIC"},
    "ResizeToFill": {"size": "auto", "antialias": None},
    "ToTensor": {},
}


def wan(**preprocess: Any) -> dict[str, Any]:
    """A whole file in the manner of published ones."""
    names = ("ToTensorVideo", "CenterCropResizeVideo", "norm_fun")
    steps = [{"trans_type": name, **({"param": STEPS[name]} if STEPS[name] else {})} for name in names]
    clip = [{"trans_type": "norm_fun", "param": {"mean": 0.5, "std": 0.5}}]
    return {
        "dataset_param": {
            "dataset_type": "t2v",
            "basic_parameters": {
                "data_path": "./examples/wan2.2/data.txt",
                "data_folder": "",
                "data_storage_mode": "combine",
            },
            "preprocess_parameters": {
                "video_reader_type": "DecordVideo",
                "image_reader_type": "Image",
                "video_processor_type": "OpensoraplanVideoProcessor",
                "num_frames": 49,
                "min_num_frames": 5,
                "frame_interval": 1,
                "train_fps": 24,
                "speed_factor": 1.0,
                "auto_interval": False,
                "drop_short_ratio": 0.0,
                "max_height": 480,
                "max_width": 832,
                "max_hxw": 399360,
                "hw_stride": 8,
                "hw_aspect_thr": 2.0,
                "force_resolution": False,
                "truncate_t_by_sp": False,
                "keep_last": False,
                "zero_start": True,
                "cfg": 0.0,
                "vae_stride": [4, 8, 8],
                "vae_patch_size": [1, 2, 2],
                "train_pipeline": {"video": steps, "first_frame_vae": clip, "first_frame_clip": clip},
                **preprocess,
            },
            "use_text_processer": True,
            "enable_text_preprocessing": True,
            "text_preprocess_methods": [{"method": "basic_clean"}, {"method": "whitespace_clean"}],
            "tokenizer_config": {"hub_backend": "hf", "from_pretrained": "Wan2.2/tokenizer", "model_max_length": 512},
        },
        "dataloader_param": {
            "dataloader_mode": "sampler",
            "sampler_type": "LengthGroupedSampler",
            "batch_size": 1,
            "num_workers": 1,
            "shuffle": False,
            "drop_last": True,
            "pin_memory": True,
            "group_data": True,
            "initial_global_step_for_sampler": 0,
            "collate_param": {},
        },
    }


def test_a_published_file(said: list[str]) -> None:
    config = GenerationDataConfig.from_dict(wan(), file="wan.json")
    param = config.dataset_param
    assert param.basic_parameters.data_path == ["./examples/wan2.2/data.txt"]
    assert (param.preprocess_parameters.num_frames, param.preprocess_parameters.cfg) == (49, 0.0)
    assert param.tokenizer_dirs == ["Wan2.2/tokenizer"] and param.text_preprocess_methods[0] == "basic_clean"
    assert config.file == "wan.json" and config.dataloader_param.sampler_type == "LengthGroupedSampler"
    for name in ("video_reader_type", "vae_stride", "truncate_t_by_sp", "first_frame_clip", "batch_size", "group_data"):
        assert sum(name in line for line in said) == 1, name
    given = {key for key in wan()["dataset_param"]["tokenizer_config"] if key not in ("from_pretrained", "hub_backend")}
    for name in given - {"autotokenizer_name", "model_max_length"}:
        assert sum(f"tokenizer_config.{name}" in line for line in said) == 1, name
    assert given - {"autotokenizer_name"}
    assert all(line.startswith("wan.json: no effect here: ") for line in said)
    assert GenerationDataConfig.from_dict(config) is config


def test_defaults_are_the_published_ones() -> None:
    file = {"dataset_param": {"dataset_type": "t2v", "basic_parameters": {"data_path": ["a.json", "b.json"]}}}
    param = GenerationDataConfig.from_dict(file).dataset_param
    pre = param.preprocess_parameters
    assert (pre.num_frames, pre.max_height, pre.max_width, pre.cfg) == (16, 480, 640, 0.1)
    assert param.basic_parameters.on_bad_sample == "skip" and param.basic_parameters.data_path == ["a.json", "b.json"]
    assert not param.enable_text_preprocessing and param.tokenizer_dirs == [] and pre.train_pipeline.of_clips is None


def test_features(said: list[str]) -> None:
    file = wan()
    file["dataset_param"] |= {"dataset_type": "feature"}
    config = GenerationDataConfig.from_dict(file)
    assert config.dataset_param.preprocess_parameters.cfg == 0.0
    (line,) = [line for line in said if "features were made" in line]
    assert f"{PRE}.num_frames" in line and "data_storage_mode" in line and f"{PRE}.cfg" not in line
    bare = {
        "dataset_param": {"dataset_type": "feature", "basic_parameters": {"data_path": "./sora_features/data.jsonl"}}
    }
    assert GenerationDataConfig.from_dict(bare).dataset_param.preprocess_parameters.cfg == 0.1


def test_every_published_step_is_taken() -> None:
    for name, param in STEPS.items():
        (step,) = read_steps([{"trans_type": name, "param": param}])  # type: ignore[misc]
        assert step["trans_type"] == name
    assert read_steps([{"trans_type": "Resize", "param": STEPS["Resize"]}]) == [
        {"trans_type": "Resize", "size": [448, 448], "interpolation": "bicubic"}
    ]


def test_the_size_that_steps_name() -> None:
    crop = {"trans_type": "CenterCropResizeVideo", "size": [480, 832]}
    assert fixed_size(None) is None and fixed_size([crop, {"trans_type": "norm_fun"}]) == (480, 832)
    assert fixed_size([crop, {"trans_type": "CenterCrop"}]) is None
    assert fixed_size([{"trans_type": "ResizeVideo", "size": [8, 8], "mode": "shortside"}]) is None
    assert fixed_size([{"trans_type": "ResizeVideo", "size": [8, 9]}]) == (8, 9)


def put(path: str, value: Any) -> dict[str, Any]:
    content = json.loads(json.dumps(wan()))
    place = content
    *parents, last = path.split(".")
    for part in parents:
        place = place.setdefault(part, {})
    place[last] = value
    return content


@pytest.mark.parametrize(
    ("path", "value", "parts"),
    [
        (f"{PRE}.num_frmes", 5, ["unknown key", "'num_frames'"]),
        (f"{BASIC}.data_pth", "x", ["unknown key", "'data_path'"]),
        (f"{PRE}.cfg", 1.5, [f"'{PRE}.cfg' is 1.5", "at most 1"]),
        (f"{PRE}.min_num_frames", 50, ["'min_num_frames' 50 is more than 'num_frames' 49; exchange them"]),
        (f"{PRE}.keep_last", True, ["'zero_start' and 'keep_last' are both true"]),
        (f"{PRE}.use_aesthetic", True, ["aesthetic scores aren't written into captions; write false"]),
        (f"{PRE}.buckets", [[9, 32]], ["isn't [frames, height, width]"]),
        (f"{PRE}.buckets", [[9, 32, 32], [9, 32, 32]], ["is there twice"]),
        (f"{PRE}.buckets", [[0, 32, 32]], ["expected numbers above 0"]),
        (f"{PRE}.train_pipeline.vidoe", [], ["unknown key", "'video'"]),
        (f"{PRE}.train_pipeline.video", [{"trans_type": "ResizeVido"}], ["step 0", "did you mean 'ResizeVideo'"]),
        (f"{PRE}.train_pipeline.video", [{"trans_type": "norm_fun", "param": {"men": 1}}], ["'men'", "'mean'"]),
        (
            f"{PRE}.train_pipeline.video",
            [{"trans_type": "Resize", "param": {"size": "big"}}],
            ["'size' is 'big'", '"auto"'],
        ),
        (
            f"{PRE}.train_pipeline.video",
            [{"trans_type": "Resize", "param": {"align_corners": True}}],
            ["expected false"],
        ),
        (f"{PRE}.train_pipeline.video", [{"trans_type": "norm_fun", "parm": {}}], ["'parm'", "did you mean 'param'"]),
        (
            f"{PRE}.train_pipeline.video_only",
            [],
            ["'video' and 'video_only' or 'video_and_first_frame' are both given"],
        ),
        (f"{BASIC}.data_storage_mode", "vace", ["'vace'", "not there yet; expected one of standard, combine"]),
        (f"{BASIC}.data_path", [], ["expected a path, or a list of paths"]),
        ("dataset_param.text_preprocess_methods", {"method": "whitespace"}, ["did you mean 'whitespace_clean'"]),
        ("dataset_param.tokenizer_config.from_pretraind", "x", ["unknown key 'from_pretraind'", "'from_pretrained'"]),
        ("dataloader_param.sampler_type", "AESampler", ["'AESampler'", "not there yet"]),
        (
            "dataset_param.dataset_type",
            "vace",
            ["is not there yet: it belongs to pretrain_sora.py", "t2v, i2v, t2i or"],
        ),
        ("dataset_param.dataset_type", "huggingface", ["belongs to pretrain_vlm.py or pretrain_transformers.py"]),
        ("dataset_param.dataset_type", "t2w", ["expected one of t2v, i2v, t2i, feature", "did you mean 't2v'"]),
    ],
)
def test_faults(path: str, value: Any, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        GenerationDataConfig.from_dict(put(path, value))
    for part in parts:
        assert part in str(caught.value)


def test_one_source_of_validation_rows() -> None:
    content = put(f"{BASIC}.val_rate", 0.1)
    assert GenerationDataConfig.from_dict(content).dataset_param.basic_parameters.val_rate == 0.1
    content["dataset_param"]["basic_parameters"]["val_data_path"] = "v.json"
    with pytest.raises(ConfigError, match=r"'val_data_path' and 'val_rate' 0\.1 are both given"):
        GenerationDataConfig.from_dict(content)


def test_names_of_samplers_of_buckets() -> None:
    content = put("dataloader_param.sampler_type", "variable_video_batch_sampler")
    content["dataloader_param"] |= {"dataloader_mode": "variable", "priority_mode": None}
    assert GenerationDataConfig.from_dict(content).dataloader_param.shuffles is False


def test_whose_file_it_is(tmp_path: Path) -> None:
    assert is_generation_data(wan()) and not is_generation_data({"dataset_param": {"dataset_type": "vace"}})
    with pytest.raises(ConfigError, match=r"'t2v'; this dataset type belongs to pretrain_sora\.py; expected hugging"):
        DataConfig.from_dict({"dataset_param": {"dataset_type": "t2v", "basic_parameters": {"data_path": "x"}}})
