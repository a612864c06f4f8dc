"""Steps of train_pipeline on pictures whose pixels are known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mindspeed_mm.configs.generation_steps import read_steps
from mindspeed_mm.data.generation.buckets import Bucket
from mindspeed_mm.data.generation.transforms import cover_size, covered, transformed
from mindspeed_mm.utils.errors import ConfigError

ENDS: list[dict[str, Any]] = [{"trans_type": "ToTensorVideo"}, {"trans_type": "norm_fun"}]
BUCKET = Bucket(10, 16, 32)


def ramp(height: int, width: int, frames: int = 10) -> np.ndarray:
    """[frames, height, width, 3]: red is the row, green the column, blue the frame, as shares of 255."""
    picture = np.zeros((frames, height, width, 3), np.float64)
    picture[..., 0] = ((np.arange(height) + 0.5) / height)[:, None]
    picture[..., 1] = (np.arange(width) + 0.5) / width
    picture[..., 2] = (np.arange(frames) / frames)[:, None, None]
    return (picture * 255).round().astype(np.uint8)


def run(picture: np.ndarray, *steps: dict[str, Any], bucket: Bucket = BUCKET) -> torch.Tensor:
    read = read_steps([*steps, *ENDS])
    assert read is not None
    return (transformed(picture, read, bucket, "video") + 1) / 2


def step(name: str, **param: Any) -> dict[str, Any]:
    return {"trans_type": name, "param": param}


#: name of the step → (rows, columns) of the picture, as shares, that are left
CASES = [
    (step("ResizeVideo", transform_size="auto", mode="resize"), (64, 64), (0, 1), (0, 1)),
    (step("Resize", size=[16, 32], interpolation="BICUBIC"), (64, 64), (0, 1), (0, 1)),
    (step("CenterCropResizeVideo", transform_size="auto"), (64, 64), (0.25, 0.75), (0, 1)),
    (step("CenterCropResizeVideo", transform_size="auto", top_crop=True), (64, 64), (0, 0.5), (0, 1)),
    (step("CenterCropResizeVideo", transform_size="auto", use_short_edge=True), (64, 128), (0, 1), (0.25, 0.75)),
    (step("ResizeCropVideo", size="auto"), (64, 256), (0, 1), (0.25, 0.75)),
    (step("ResizeToFill", size="auto"), (64, 64), (0.25, 0.75), (0, 1)),
    (step("CenterCrop", size=[16, 32]), (32, 64), (0.25, 0.75), (0.25, 0.75)),
]


@pytest.mark.parametrize(("first", "size", "rows", "columns"), CASES)
def test_what_is_left_of_a_picture(
    first: dict[str, Any], size: tuple[int, int], rows: tuple[float, float], columns: tuple[float, float]
) -> None:
    made = run(ramp(*size), first)
    assert made.shape == (3, *BUCKET) and made.dtype == torch.float32
    for channel, (low, high), length, axis in ((0, rows, 16, 1), (1, columns, 32, 2)):
        expected = low + (high - low) * (torch.arange(length) + 0.5) / length
        found = made[channel, 3].mean(dim=2 - axis)
        assert torch.allclose(found[2:-2], expected[2:-2], atol=0.012), first
    assert torch.allclose(made[2].mean(dim=(1, 2)), torch.arange(10) / 10, atol=0.003)


def test_short_and_long_sides() -> None:
    shortside = step("ResizeVideo", transform_size="auto", mode="shortside")
    assert run(ramp(64, 64), shortside, step("CenterCrop", size="auto")).shape == (3, *BUCKET)
    number = step("Resize", size=16)
    assert run(ramp(32, 128), number, step("CenterCrop", size="auto")).shape == (3, *BUCKET)
    longside = step("ResizeVideo", transform_size="auto", mode="longside")
    padded = run(ramp(64, 64), longside, step("Pad2Square", mean=0.5), bucket=Bucket(10, 16, 16))
    assert padded.shape == (3, 10, 16, 16)
    wide = run(ramp(32, 64), longside, step("Pad2Square", mean=[1, 0, 0]), bucket=Bucket(10, 32, 32))
    assert wide[:, 0, 0, 0].tolist() == [1, 0, 0] and torch.allclose(
        wide[1, 0, 16].mean(), torch.tensor(0.5), atol=0.01
    )
    with pytest.raises(ConfigError, match="a picture of 8×32 pixels can't be cut to 16×32; put ResizeVideo"):
        run(ramp(8, 32), step("CenterCrop", size="auto"))


def test_sizing_before_and_after_tensors_is_the_same() -> None:
    before = run(ramp(64, 64), step("CenterCropResizeVideo", transform_size="auto"))
    read = read_steps([ENDS[0], step("CenterCropResizeVideo", transform_size="auto"), ENDS[1]])
    assert read is not None
    after = (transformed(ramp(64, 64), read, BUCKET, "video") + 1) / 2
    assert torch.allclose(before, after, atol=0.004)


def test_bicubic_stays_between_black_and_white() -> None:
    picture = np.zeros((1, 64, 128, 3), np.uint8)
    picture[:, :, ::4] = 255
    read = read_steps([ENDS[0], step("Resize", size="auto", interpolation_mode="bicubic", antialias=False), ENDS[1]])
    assert read is not None
    made = transformed(picture, read, Bucket(1, 160, 320), "video")
    assert float(made.min()) >= -1 and float(made.max()) <= 1


def test_without_steps_the_middle_is_cut() -> None:
    assert cover_size(1920, 1080, Bucket(1, 480, 832)) == (853, 480)
    assert cover_size(100, 100, Bucket(1, 480, 832)) == (832, 832)
    made = covered(ramp(20, 32, 2), Bucket(2, 16, 32))
    assert made.shape == (3, 2, 16, 32) and made.is_contiguous()
    assert torch.allclose((made[0, 0, :, 0] + 1) / 2, (torch.arange(2, 18) + 0.5) / 20, atol=0.003)
    white = covered(np.full((1, 16, 32, 3), 255, np.uint8), Bucket(1, 16, 32))
    assert float(white.min()) == float(white.max()) == 1.0
