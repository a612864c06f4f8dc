"""Check the published steps from pictures to pixel values (`train_pipeline`) against the processor that does them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed_mm.configs.data_config import PreprocessParameters
from mindspeed_mm.configs.scalars import show
from mindspeed_mm.configs.sections import raise_all
from mindspeed_mm.data.processors import Processor

_PIPELINE = "dataset_param.preprocess_parameters.train_pipeline"
_RESAMPLE = {"nearest": 0, "bilinear": 2, "bicubic": 3}  # numbers of PIL.Image.Resampling
_SIZING = ("Resize", "ResizeVideo")
_SLACK = 1e-6


def check_steps(processor: Processor, options: PreprocessParameters, path: str) -> None:
    """Check that the steps of `train_pipeline` are what a processor does to pictures and frames.

    Args:
        processor: transformers' processor; its image processor handles pictures and, without a video processor, frames.
        options: `preprocess_parameters`.
        path: directory of the processor, for messages.

    Raises:
        ConfigError: a step that the processor doesn't take, or takes with other numbers.
    """
    raise_all(
        [
            f"{_PIPELINE}.{kind}: step {number} ({step['trans_type']}): {problem}; pictures go through "
            f"{type(part).__name__} of {path}, whose files say what it does: leave the step out, or change these"
            for kind, part in _parts(processor)
            for number, step in enumerate(getattr(options.train_pipeline, kind) or ())
            if (problem := _problem(step, part, options))
        ]
    )


def _parts(processor: Processor) -> list[tuple[str, object]]:
    image = getattr(processor, "image_processor", None)
    return [("image", image), ("video", getattr(processor, "video_processor", None) or image)]


def _problem(step: Mapping[str, Any], part: object, options: PreprocessParameters) -> str | None:
    name = step["trans_type"]
    if name in ("ToTensor", "ToTensorVideo"):
        return None if getattr(part, "do_rescale", True) else "values are not scaled to 0 … 1 there"
    if name == "norm_fun":
        return _differing(step, ("mean", "std"), part)
    if name == "Pad2Square":
        tiled = options.crop_to_patches if options.crop_to_patches is not None else getattr(part, "crop_to_patches", 0)
        # Tiles, and the whole picture beside them, are square: there is nothing to pad.
        return None if tiled else "pictures are not padded there"
    if name in _SIZING and step.get("mode", "resize") == "resize":
        return _sizing(step, part)
    return "there is no such step there"


def _sizing(step: Mapping[str, Any], part: object) -> str | None:
    asked = step.get("size")
    size: Any = getattr(part, "size", None)
    actual = [size.get("height"), size.get("width")] if hasattr(size, "get") else None
    if isinstance(asked, list) and actual is not None and None not in actual and asked != actual:
        return f"'size' is {show(asked)}, and {show(actual)} there"
    interpolation, resample = step.get("interpolation"), getattr(part, "resample", None)
    if interpolation is not None and resample is not None and _RESAMPLE[interpolation] != int(resample):
        names = {number: name for name, number in _RESAMPLE.items()}
        return f"'interpolation' is {show(interpolation)}, and {show(names.get(int(resample), str(resample)))} there"
    return "'antialias' is false, and true there" if step.get("antialias") is False else None


def _differing(step: Mapping[str, Any], keys: Sequence[str], part: object) -> str | None:
    for key in keys:
        asked, actual = step.get(key), getattr(part, f"image_{key}", None)
        if asked is None or actual is None:
            continue
        wide = list(asked) * (len(actual) // len(asked))
        if any(abs(a - b) > _SLACK for a, b in zip(wide, actual, strict=True)):
            return f"'{key}' is {show(asked)}, and {show(list(actual))} there"
    return None
