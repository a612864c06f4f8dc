"""Transform decoded frames to the model's input: [3, frames, height, width] float32 in [-1, 1].

Without steps in data.json a picture is scaled so that it covers the bucket (area-true when it shrinks), its middle is
cut out, and values are scaled. The steps of `train_pipeline`:

- ResizeVideo, Resize: mode resize: to `size`; shortside: keeps the ratio and covers `size` (one number: that is the
  shorter side); longside: keeps the ratio and fits into `size`
- CenterCropResizeVideo: cuts the largest middle part of the ratio of `size` (top_crop: the upper one; use_short_edge:
  a square), then scales it to `size`
- ResizeCropVideo, ResizeToFill: scales to cover `size`, then cuts the middle
- CenterCrop: cuts `size` out of the middle
- Pad2Square: adds a border of colour `mean`
- ToTensorVideo, ToTensor: 0 … 255 becomes 0 … 1
- norm_fun: (value − mean) ÷ std
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mindspeed_mm.data.generation.buckets import Bucket
from mindspeed_mm.utils.errors import ConfigError

_PIPELINE = "dataset_param.preprocess_parameters.train_pipeline"
_AT_ONCE = 8  # frames that go through the steps together: floats of a whole clip at its own size would fill the memory
_SLACK = 1e-4

Steps = Sequence[Mapping[str, Any]]


def cover_size(width: int, height: int, bucket: Bucket) -> tuple[int, int]:
    """Return the width and height of a picture scaled to cover a bucket, its ratio kept."""
    scale = max(bucket.width / width, bucket.height / height)
    return max(bucket.width, round(width * scale)), max(bucket.height, round(height * scale))


def covered(frames: np.ndarray, bucket: Bucket) -> torch.Tensor:
    """Cut the middle out of frames that cover a bucket, and scale their values.

    Args:
        frames: [frames, height, width, 3] uint8.
        bucket: The shape.

    Returns:
        [3, frames, height, width] float32 in [-1, 1].
    """
    top, left = (frames.shape[1] - bucket.height) // 2, (frames.shape[2] - bucket.width) // 2
    part = torch.from_numpy(frames[:, top : top + bucket.height, left : left + bucket.width])
    return part.permute(3, 0, 1, 2).to(torch.float32, memory_format=torch.contiguous_format).div_(127.5).sub_(1)


def transformed(frames: np.ndarray, steps: Steps, bucket: Bucket, kind: str) -> torch.Tensor:
    """Apply the steps of `train_pipeline` to frames.

    Args:
        frames: [frames, height, width, 3] uint8.
        steps: As `read_steps` returns them.
        bucket: The shape of the result.
        kind: "video" or "image", for messages.

    Returns:
        [3, frames, height, width] float32 in [-1, 1].

    Raises:
        ConfigError: The result has another shape; names the step to change.
    """
    result = torch.empty((3, len(frames), bucket.height, bucket.width), dtype=torch.float32)
    for begin in range(0, len(frames), _AT_ONCE):
        part = torch.from_numpy(np.ascontiguousarray(frames[begin : begin + _AT_ONCE])).permute(0, 3, 1, 2)
        for step in steps:
            part = _apply(part, step, bucket)
        _check(part, bucket, kind)
        result[:, begin : begin + _AT_ONCE] = part.transpose(0, 1)
    return result.clamp_(-1, 1)  # bicubic scaling reaches beyond black and white


def _check(part: torch.Tensor, bucket: Bucket, kind: str) -> None:
    where = f"{_PIPELINE}.{kind}"
    if tuple(part.shape[2:]) != (bucket.height, bucket.width):
        raise ConfigError(
            f"{where}: {part.shape[2]}×{part.shape[3]} pixels come out of its steps, and the bucket has "
            f'{bucket.height}×{bucket.width}; end them with CenterCropResizeVideo of size "auto", or leave {kind} out'
        )


def check_values(steps: Steps, kind: str) -> None:
    """Check, without a picture, that values from -1 to 1 come out of the steps.

    Args:
        steps: As `read_steps` returns them.
        kind: "video" or "image", for messages.

    Raises:
        ConfigError: The result has other values; names the step to change.
    """
    low, high = [0.0] * 3, [255.0] * 3
    for step in steps:
        if step["trans_type"] in ("ToTensorVideo", "ToTensor") and high == [255.0] * 3:
            low, high = [0.0] * 3, [1.0] * 3
        elif step["trans_type"] == "norm_fun":
            mean, std = (_of_channels(step.get(key, [0.5])) for key in ("mean", "std"))
            low = [(value - m) / s for value, m, s in zip(low, mean, std, strict=True)]
            high = [(value - m) / s for value, m, s in zip(high, mean, std, strict=True)]
    if max(abs(value - 1) for value in (*high, *(-value for value in low))) > _SLACK:
        add = "add ToTensorVideo and norm_fun" if high[0] > 100 else "write norm_fun"
        raise ConfigError(
            f"{_PIPELINE}.{kind}: values from {min(low):.3g} to {max(high):.3g} come out of its steps, and the model "
            f"takes -1 … 1; {add} with mean 0.5 and std 0.5"
        )


def _of_channels(values: Sequence[float]) -> list[float]:
    return list(values) * (3 // len(values))


def _apply(part: torch.Tensor, step: Mapping[str, Any], bucket: Bucket) -> torch.Tensor:
    """Apply one step to [frames, 3, height, width], uint8 or float32."""
    name = step["trans_type"]
    if name in ("ToTensorVideo", "ToTensor"):
        return part if part.is_floating_point() else part.to(torch.float32).div_(255)
    if name == "norm_fun":
        mean, std = (torch.tensor(step.get(key, [0.5])).view(1, -1, 1, 1) for key in ("mean", "std"))
        return (part.to(torch.float32) - mean) / std
    if name == "Pad2Square":
        return _squared(part, step.get("mean", [0.0]))
    size = step.get("size")
    height, width = (bucket.height, bucket.width) if size is None else (size, size) if isinstance(size, int) else size
    if name in ("ResizeVideo", "Resize"):
        default = "shortside" if isinstance(size, int) else "resize"
        return _scaled(part, _sides(part, height, width, step.get("mode", default)), step)
    if name in ("ResizeCropVideo", "ResizeToFill"):
        return _middle(_scaled(part, _sides(part, height, width, "shortside"), step), height, width)
    if name == "CenterCrop":
        return _middle(part, height, width)
    own = part.shape[2], part.shape[3]
    if step.get("use_short_edge"):
        cut = min(own), min(own)
    else:
        scale = min(own[0] / height, own[1] / width)
        cut = min(own[0], round(height * scale)), min(own[1], round(width * scale))
    return _scaled(_middle(part, *cut, top=bool(step.get("top_crop"))), (height, width), step)


def _sides(part: torch.Tensor, height: int, width: int, mode: str) -> tuple[int, int]:
    if mode == "resize":
        return height, width
    own = part.shape[2], part.shape[3]
    if height == width and mode == "shortside":
        scale = height / min(own)
    else:
        scale = (max if mode == "shortside" else min)(height / own[0], width / own[1])
    sides = round(own[0] * scale), round(own[1] * scale)
    if mode == "shortside":
        return max(height, sides[0]), max(width, sides[1])
    return max(1, min(height, sides[0])), max(1, min(width, sides[1]))


def _scaled(part: torch.Tensor, size: tuple[int, int], step: Mapping[str, Any]) -> torch.Tensor:
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.v2 import functional

    if tuple(part.shape[2:]) == size:
        return part
    how = InterpolationMode(step.get("interpolation", "bilinear"))
    smooth = step.get("antialias", True) and how != InterpolationMode.NEAREST
    return functional.resize(part, list(size), interpolation=how, antialias=smooth)


def _middle(part: torch.Tensor, height: int, width: int, top: bool = False) -> torch.Tensor:
    if part.shape[2] < height or part.shape[3] < width:
        raise ConfigError(
            f"{_PIPELINE}: a picture of {part.shape[2]}×{part.shape[3]} pixels can't be cut to {height}×{width}; "
            "put ResizeVideo with mode shortside before"
        )
    first = 0 if top else (part.shape[2] - height) // 2
    left = (part.shape[3] - width) // 2
    return part[:, :, first : first + height, left : left + width]


def _squared(part: torch.Tensor, colour: Sequence[float]) -> torch.Tensor:
    side = max(part.shape[2:])
    values = torch.tensor(colour).expand(3).view(1, 3, 1, 1)
    if not part.is_floating_point():
        values = (values * 255).round()
    canvas = values.to(part.dtype).expand(len(part), 3, side, side).clone()
    first, left = (side - part.shape[2]) // 2, (side - part.shape[3]) // 2
    canvas[:, :, first : first + part.shape[2], left : left + part.shape[3]] = part
    return canvas


def crop_of(crop: tuple[int, int, int, int] | None, width: int, height: int) -> tuple[int, int, int, int]:
    """Return left, right, top and bottom of the part of a picture that is used; all of it without a crop.

    Raises:
        ValueError: The crop exceeds the picture.
    """
    if crop is None:
        return 0, width, 0, height
    left, right, top, bottom = crop
    if right > width or bottom > height:
        raise ValueError(f"'crop' {list(crop)} reaches out of the picture, which has {width}×{height} pixels")
    return left, right, top, bottom


def scaled_crop(crop: tuple[int, int, int, int], scale: tuple[float, float]) -> tuple[slice, slice]:
    """Return rows and columns of a crop in a picture that was scaled by (horizontally, vertically)."""
    rows = slice(math.floor(crop[2] * scale[1]), math.ceil(crop[3] * scale[1]))
    return rows, slice(math.floor(crop[0] * scale[0]), math.ceil(crop[1] * scale[0]))
