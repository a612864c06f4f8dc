"""InternVL's keys of tiles and frames: honoured, or refused where neglecting them would train something else."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mindspeed_mm.configs.data_config import DataConfig, DatasetParam
from mindspeed_mm.data import build_mm_dataset
from mindspeed_mm.data.conversation.tokens import Tokenizer
from mindspeed_mm.data.media.media import Geometry
from mindspeed_mm.models.transformers.adapters import find_adapter
from mindspeed_mm.utils.errors import ConfigError
from tests.support.clips import write_clip
from tests.support.families import families

FAMILY = "internvl"


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families()[FAMILY].make(tmp_path_factory.mktemp("hf") / "hf")


def described(hf_dir: Path, data: Path | str = "rows.json", **keys: Any) -> dict[str, Any]:
    """A published data.json of InternVL: keys of tiles and frames stand beside the data set."""
    return {
        "dataset_type": "multimodal",
        "basic_parameters": {"data_path": str(data), "data_folder": str(Path(data).parent), "repeat_time": 1},
        "tokenizer_config": {"from_pretrained": str(hf_dir), "add_eos_token": False},
        "template_name": "internvl2_5",
        **keys,
    }


def tiles(hf_dir: Path, size: tuple[int, int], **keys: Any) -> int:
    """Tiles of a picture, as foreseen and as the processor makes them."""
    options = DatasetParam.from_dict(described(hf_dir, **keys)).preprocess_parameters
    adapter = find_adapter(SimpleNamespace(init_from_hf_path=str(hf_dir)))
    processor = adapter.load_processor(str(hf_dir), options)
    tokenizer = Tokenizer(processor, adapter, {})
    made, (text,) = tokenizer.process([("image", Image.new("RGB", size))])
    foreseen = tokenizer.foresee(Geometry("image", size[1], size[0]))
    assert foreseen is not None and foreseen.text == text and foreseen.rows == len(made["pixel_values"])
    return len(made["pixel_values"])


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, 4 + 1),  # the processor's own most is 4
        ({"dynamic_image_size": True, "use_thumbnail": True}, 4 + 1),
        ({"max_dynamic_patch": 6}, 6 + 1),
        ({"max_dynamic_patch": 2, "min_dynamic_patch": 1}, 2 + 1),
        ({"dynamic_image_size": False}, 1),
        ({"dynamic_image_size": False, "max_dynamic_patch": 6}, 1),
    ],
)
def test_tiles_of_a_wide_picture(hf_dir: Path, keys: dict[str, Any], expected: int) -> None:
    assert tiles(hf_dir, (600, 100), **keys) == expected


def test_least_tiles(hf_dir: Path) -> None:
    assert tiles(hf_dir, (32, 32)) == 1 and tiles(hf_dir, (32, 32), min_dynamic_patch=4) == 5


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"use_thumbnail": False}, "use_thumbnail' is false; the processor always adds"),
        ({"template_name": "deepseek2"}, "template_name' is 'deepseek2'; .*basic_parameters.template"),
        ({"tokenizer_config": {"from_pretrained": "x", "add_eos_token": True}}, "add_eos_token' is true"),
        ({"max_dynamic_patch": "many"}, "dataset_param.max_dynamic_patch' is 'many'"),
        ({"max_dynamic_patch": 6, "preprocess_parameters": {"max_patches": 4}}, "they are the same, keep one"),
        ({"preprocess_parameters": {"image_resolution": 512}}, "image_resolution' is 512; write image_max_pixels"),
    ],
)
def test_what_can_not_be_kept_is_refused(hf_dir: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataConfig.from_dict({"dataset_param": described(hf_dir, **keys)})


def test_a_tile_of_another_size(hf_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"image_size\) is 449, and the processor of .* makes tiles of \d+ pixels"):
        tiles(hf_dir, (100, 100), image_size=449)


def test_tiles_of_a_processor_without_them(tmp_path: Path) -> None:
    other = families()["llava"].make(tmp_path / "hf")
    options = DatasetParam.from_dict(described(other, max_dynamic_patch=6)).preprocess_parameters
    adapter = find_adapter(SimpleNamespace(init_from_hf_path=str(other)))
    with pytest.raises(ConfigError, match=r"max_patches .* doesn't cut images into tiles"):
        adapter.load_processor(str(other), options)


@pytest.mark.parametrize("keys", [{"sampling_method": "rand"}, {"max_num_frame": 32, "min_num_frame": 8}])
def test_frames_drawn_by_number(hf_dir: Path, tmp_path: Path, keys: dict[str, Any]) -> None:
    """A published launch on pictures trains; a video ends the run with the sentence that says what to write."""
    Image.fromarray(np.zeros((40, 40, 3), np.uint8)).save(tmp_path / "a.png")
    write_clip(tmp_path / "a.mp4", frames=4)
    turns = [{"from": "human", "value": "<{}>\nwhat?"}, {"from": "gpt", "value": "red"}]
    rows = [
        {kind: name, "conversations": [{**turns[0], "value": turns[0]["value"].format(kind)}, turns[1]]}
        for kind, name in (("image", "a.png"), ("video", "a.mp4"))
    ]
    data = tmp_path / "rows.json"
    data.write_text(json.dumps(rows))
    adapter = find_adapter(SimpleNamespace(init_from_hf_path=str(hf_dir)))
    dataset = build_mm_dataset(described(hf_dir, data, **keys), adapter=adapter)
    assert not isinstance(dataset, tuple) and "pixel_values" in dataset[0]
    for ask in (dataset.measure, dataset.__getitem__):
        with pytest.raises(ConfigError, match=f"row 2: the row has a video.*{next(iter(keys))}.*video_fps"):
            ask(1)


def _steps(hf_dir: Path, **changed: Any) -> list[dict[str, Any]]:
    """The published steps from a picture to pixel values, with the processor's own numbers."""
    part = (
        find_adapter(SimpleNamespace(init_from_hf_path=str(hf_dir)))
        .load_processor(str(hf_dir), DatasetParam.from_dict(described(hf_dir)).preprocess_parameters)
        .image_processor
    )
    own = {"size": [part.size["height"], part.size["width"]], "interpolation": "BICUBIC", "antialias": None}
    norm = {"mean": list(part.image_mean), "std": list(part.image_std)}
    return [
        {"trans_type": "Pad2Square", "param": {"mean": norm["mean"]}},
        {"trans_type": "Resize", "param": own | changed.pop("Resize", {})},
        {"trans_type": "ToTensor"},
        {"trans_type": "norm_fun", "param": norm | changed.pop("norm_fun", {})},
        *([{"trans_type": name, "param": param} for name, param in changed.items()]),
    ]


@pytest.mark.parametrize(
    ("changed", "tiled", "problem"),
    [
        ({}, True, None),
        ({}, False, r"step 0 \(Pad2Square\): pictures are not padded there"),
        ({"norm_fun": {"mean": [0.5, 0.5, 0.5]}}, True, r"step 3 \(norm_fun\): 'mean' is .*0.5.*, and .*there"),
        ({"norm_fun": {"std": 0.5}}, True, r"'std' is \[0.5\], and "),
        ({"Resize": {"size": [448, 448]}}, True, r"step 1 \(Resize\): 'size' is \[448, 448\], and "),
        ({"Resize": {"interpolation": "bilinear"}}, True, "'interpolation' is 'bilinear', and 'bicubic' there"),
        ({"Resize": {"antialias": False}}, True, "'antialias' is false"),
        ({"CenterCrop": {"size": 32}}, True, r"step 4 \(CenterCrop\): there is no such step there"),
    ],
)
def test_published_steps_are_the_processors(
    hf_dir: Path, changed: dict[str, Any], tiled: bool, problem: str | None
) -> None:
    steps = {"train_pipeline": {"image": _steps(hf_dir, **changed)}}
    keys = {"preprocess_parameters": steps, "dynamic_image_size": tiled}
    if problem is None:
        assert tiles(hf_dir, (600, 100), **keys) == 5
        return
    with pytest.raises(ConfigError, match=problem):
        tiles(hf_dir, (600, 100), **keys)
