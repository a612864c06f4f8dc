"""The adapter of a model family for the data pipeline: a protocol, which each family implements in its folder."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from mindspeed_mm.configs.data_config import PreprocessParameters
from mindspeed_mm.configs.hf_directory import describe_missing_model
from mindspeed_mm.data.media.media import DecodedVideo, Foreseen, Geometry, MediaKind
from mindspeed_mm.data.media.processor_steps import check_steps
from mindspeed_mm.data.processors import Processor
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.extras import missing_library, require_torchvision

if TYPE_CHECKING:
    from mindspeed_mm.data.media.media_reader import MediaLimits

#: frame rate of a video's file in the processor's metadata: frames are numbered by microseconds
TICKS = 1_000_000
_PATH_KEY = "dataset_param.preprocess_parameters.model_name_or_path"
_OPTION_GROUPS = ("text_kwargs", "images_kwargs", "videos_kwargs", "audio_kwargs")
_TYPES_OPTION = "return_mm_token_type_ids"
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")


@runtime_checkable
class DataAdapter(Protocol):
    """A model family, for the data pipeline. Must be picklable: it is sent to the loader's workers."""

    media_keys: Mapping[str, Sequence[str]]
    """Medium ("image", "video", "audio") → names of its tensors in a batch; the last one has one row a medium."""

    token_keys: Sequence[str]
    """Names of tensors beside `input_ids` with one value per token; the first one has the kinds of media."""

    padded_keys: Sequence[str]
    """Media tensors that are padded with zeros to the largest picture of the batch; the model cuts the padding off."""

    one_at_a_time: bool
    """Whether the processor gets one medium per call, in the row's order. Needed where kinds share tensors."""

    encoder_class: type[Any] | None
    """Replaces `mindspeed_mm.data.conversation.encode.Encoder`, with the same arguments and methods; None: that one."""

    def media_counts(self, batch: Mapping[str, Any]) -> dict[str, int]:
        """Return the number of media of each kind in a batch, 0 included."""
        ...

    def load_processor(self, path: str, options: PreprocessParameters) -> Processor:
        """Return the processor of the model in `path`, or its tokenizer where it reads text only."""
        ...

    def reads(self, processor: Processor) -> tuple[MediaKind, ...]:
        """Return the kinds of media that a processor takes."""
        ...

    def limits(self, processor: Processor) -> MediaLimits:
        """Return the limits of the processor: smallest sides, frames, sampling rate."""
        ...

    def foresee(self, processor: Processor, geometry: Geometry) -> Foreseen | None:
        """Predict the tokens of a medium from its geometry, without decoding it; None where it must be decoded.

        Each process checks the prediction once against the processor itself before it uses it.
        """
        ...

    def video_metadata(self, clip: DecodedVideo) -> dict[str, Any]:
        """Return the metadata of a clip for the processor: the fields of transformers' VideoMetadata."""
        ...

    def video_options(self, clip: DecodedVideo) -> dict[str, Any]:
        """Return the processor's arguments for a clip; clips of one call have the same."""
        ...


class DefaultAdapter:
    """Processors like Qwen-VL's and Qwen-Omni's (media tensors stacked on dim 0, one row a medium), and text models."""

    media_keys: Mapping[str, Sequence[str]] = {
        "image": ("pixel_values", "image_grid_thw"),
        "video": ("pixel_values_videos", "second_per_grid_ts", "video_second_per_grid", "video_grid_thw"),
        "audio": ("input_features", "feature_attention_mask"),
    }
    token_keys: Sequence[str] = ("mm_token_type_ids",)
    padded_keys: Sequence[str] = ()
    one_at_a_time: bool = False
    encoder_class: type[Any] | None = None

    def media_counts(self, batch: Mapping[str, Any]) -> dict[str, int]:
        """Count media by the rows of their last tensor."""
        return {
            medium: int(batch[keys[-1]].shape[0]) if batch.get(keys[-1]) is not None else 0
            for medium, keys in self.media_keys.items()
        }

    def load_processor(self, path: str, options: PreprocessParameters) -> Processor:
        """Load the processor named in the directory, or the tokenizer where there is no processor.

        The class is taken by its name: transformers' Auto classes import much that a data worker never needs.

        Raises:
            ConfigError: Nothing loadable in `path`.
        """
        import transformers

        if has_processor(path):
            require_torchvision(f"the processor of {path}")
        extra: dict[str, Any] = {"trust_remote_code": options.trust_remote_code}
        if options.fix_mistral_regex:
            extra["fix_mistral_regex"] = True
        try:
            if has_processor(path):
                name = _processor_class(path)
                found = getattr(transformers, name, None) if name and not options.trust_remote_code else None
                loaded = (found or transformers.AutoProcessor).from_pretrained(path, **extra)
                processor = _with_call_defaults(_settled(loaded))
            else:
                return transformers.AutoTokenizer.from_pretrained(path, **extra)
        except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
            why = missing_library(error) or error
            raise ConfigError(f"{_PATH_KEY}: the processor of {path} can't be loaded: {why}") from error
        check_steps(processor, options, path)
        return _tiled(processor, options, path)

    def reads(self, processor: Processor) -> tuple[MediaKind, ...]:
        """Return the kinds for which the processor has a part and a placeholder token."""
        parts: dict[MediaKind, tuple[str, ...]] = {
            "image": ("image_processor",),
            "video": ("video_processor",),
            "audio": ("feature_extractor", "audio_processor"),
        }
        return tuple(
            kind
            for kind, names in parts.items()
            if any(getattr(processor, name, None) is not None for name in names)
            and isinstance(getattr(processor, f"{kind}_token", None), str)
        )

    def limits(self, processor: Processor) -> MediaLimits:
        """Read the limits from the processor's parts, under the names of Qwen-VL's."""
        from mindspeed_mm.data.media.media_reader import MediaLimits

        image, video = getattr(processor, "image_processor", None), getattr(processor, "video_processor", None)
        sound = getattr(processor, "feature_extractor", None) or getattr(processor, "audio_processor", None)
        found: dict[str, Any] = {}
        if image is not None:
            found["image_factor"] = _number(image, "patch_size", 1) * _number(image, "merge_size", 1)
            found["image_min_pixels"] = _size(image, "shortest_edge")
        if video is not None:
            found["video_min_pixels"] = _size(video, "shortest_edge")
            found["video_fps"] = getattr(video, "fps", None)
            found["video_min_frames"] = getattr(video, "min_frames", None)
            found["video_max_frames"] = getattr(video, "max_frames", None)
            found["temporal_patch"] = getattr(video, "temporal_patch_size", None)
        if sound is not None:
            found["sampling_rate"] = getattr(sound, "sampling_rate", None)
            found["max_audio_seconds"] = getattr(sound, "chunk_length", None)
        return MediaLimits(**{name: value for name, value in found.items() if value is not None})

    def foresee(self, processor: Processor, geometry: Geometry) -> Foreseen | None:
        """Get the number of patches or tokens of a medium from the processor's parts, and repeat its token.

        The parts are asked, not the processor: its own counting checks every one of its options at each call.
        """
        token = getattr(processor, f"{geometry.kind}_token", None)
        if not isinstance(token, str):
            return None
        if geometry.kind == "audio":
            count = getattr(processor, "_get_num_audio_tokens", None)
            if count is None:
                return None
            frames = math.ceil(geometry.samples / _number(processor.feature_extractor, "hop_length", 160))
            return Foreseen(token * count(geometry.samples), frames, frames**2)
        if geometry.kind == "image":
            part, groups = processor.image_processor, 1
            if not hasattr(part, "get_number_of_image_patches"):
                return None
            patches = part.get_number_of_image_patches(geometry.height, geometry.width, {})
        else:
            part = processor.video_processor
            if not hasattr(part, "get_num_of_video_patches"):
                return None
            groups = max(1, -(-geometry.frames // _number(part, "temporal_patch_size", 1)))
            patches = part.get_num_of_video_patches(geometry.frames, geometry.height, geometry.width, {})
        return Foreseen(token * (patches // _number(part, "merge_size", 1) ** 2), patches, patches**2 // groups)

    def video_metadata(self, clip: DecodedVideo) -> dict[str, Any]:
        """Return the time of each frame, and their rate.

        transformers divides the number of a frame in its file by the file's frame rate. Files with uneven frames have
        no such rate, so frames are numbered by microseconds.
        """
        length = len(clip.timestamps) * TICKS / clip.fps
        return {"total_num_frames": length, "fps": float(TICKS), "frames_indices": in_ticks(clip.timestamps)}

    def video_options(self, clip: DecodedVideo) -> dict[str, Any]:
        """Return no arguments: none are needed."""
        return {}


def in_ticks(times: Sequence[float]) -> list[int]:
    """Return the frame numbers for the processor of frames that are shown at these seconds."""
    return [round(second * TICKS) for second in times]


def has_processor(path: str) -> bool:
    """Whether a model directory has a processor."""
    return any(os.path.isfile(os.path.join(path, name)) for name in _PROCESSOR_FILES)


def check_model_path(path: str) -> None:
    """Check, without loading anything, that a model directory exists and has a tokenizer.

    Raises:
        ConfigError: With the nearest name beside it or how to fetch it, or what was looked for in it.
    """
    if os.path.isdir(path):
        if not any(os.path.isfile(os.path.join(path, name)) for name in _TOKENIZER_FILES):
            raise ConfigError(f"{_PATH_KEY}: {path} holds no tokenizer; looked for {', '.join(_TOKENIZER_FILES)}")
        return
    raise ConfigError(f"{_PATH_KEY}: {describe_missing_model(path)}")


def _settled(processor: Processor) -> Processor:
    """Set the default that a warning of transformers announces to change: pixels are limited per frame, as today."""
    video = getattr(processor, "video_processor", None)
    if video is not None and getattr(video, "cap_pixels_per_frame", False) is None:
        video.cap_pixels_per_frame = False
    return processor


def _with_call_defaults(processor: Processor) -> Processor:
    """Copy a processor's default arguments into its attributes, where transformers has them since 5.23.

    Before, and in classes written for earlier versions, they are defaults of the class of its arguments, which take
    precedence over attributes.
    """
    stated = getattr(getattr(processor, "valid_processor_kwargs", None), "_defaults", {})
    for group in _OPTION_GROUPS:
        if stated.get(group):
            setattr(processor, group, {**(getattr(processor, group, None) or {}), **stated[group]})
    text = getattr(processor, "text_kwargs", None) or {}
    own = getattr(processor, _TYPES_OPTION, False)
    setattr(processor, _TYPES_OPTION, bool(text.get(_TYPES_OPTION, own)))
    return processor


def _tiled(processor: Processor, options: PreprocessParameters, path: str) -> Processor:
    """Let a processor cut images into the number of tiles that data.json sets."""
    names = ("crop_to_patches", "min_patches", "max_patches")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    part = getattr(processor, "image_processor", None)
    missing = [name for name in given if not hasattr(part, name) and given[name] is not False]
    if missing:
        raise ConfigError(
            f"dataset_param.preprocess_parameters: {', '.join(missing)} (or InternVL's names, dynamic_image_size …): "
            f"{type(part).__name__} of {path} doesn't cut images into tiles so; remove it"
        )
    side = _size(part, "height")
    if options.tile_size is not None and side is not None and options.tile_size != side:
        raise ConfigError(
            f"dataset_param.preprocess_parameters.tile_size (InternVL's image_size) is {options.tile_size}, and the "
            f"processor of {path} makes tiles of {side} pixels; write {side}, or remove it"
        )
    given = {name: value for name, value in given.items() if hasattr(part, name)}
    if given:
        processor.images_kwargs = {**(getattr(processor, "images_kwargs", None) or {}), **given}
    return processor


def _number(part: object, name: str, default: int) -> int:
    value = getattr(part, name, None)
    return value if isinstance(value, int) else default


def _size(part: object, name: str) -> int | None:
    size: Any = getattr(part, "size", None)
    value = size.get(name) if hasattr(size, "get") else getattr(size, name, None)
    return value if isinstance(value, int) else None


def _processor_class(path: str) -> str | None:
    for name in ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json"):
        try:
            found = json.loads(Path(path, name).read_text(encoding="utf-8")).get("processor_class")
        except (OSError, ValueError):
            continue
        if isinstance(found, str):
            return found
    return None
