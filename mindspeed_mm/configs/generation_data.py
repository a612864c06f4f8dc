"""`data.json` of models that make videos or images: captioned clips, or features extracted from them in advance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

from mindspeed_mm.configs.data_config import (
    MEDIA_MAX_PIXELS,
    MEDIA_MAX_PIXELS_IS,
    DataloaderParam,
    read_row_limit,
)
from mindspeed_mm.configs.generation_rules import (
    GENERATION_SAMPLERS,
    GENERATION_SAMPLERS_NOT_YET,
    IDLE_GENERATION_DATA_KEYS,
    REFUSED_GENERATION_DATA_KEYS,
)
from mindspeed_mm.configs.generation_steps import read_steps
from mindspeed_mm.configs.other_scripts import GENERATION_TYPES, dataset_type_problem
from mindspeed_mm.configs.published import log_no_effect, published_paths, refusals
from mindspeed_mm.configs.scalars import read_int, show
from mindspeed_mm.configs.sections import (
    Bool,
    Count,
    Float,
    Section,
    Size,
    build_section,
    one_of,
    plain,
    raise_all,
)
from mindspeed_mm.utils.errors import ConfigError, did_you_mean

_TEXT_METHODS = ("basic_clean", "whitespace_clean")
_LONGEST = 100_000


def _read_paths(value: object) -> object:
    """One path or a list of them."""
    paths = [value] if isinstance(value, str) else value
    if not isinstance(paths, list) or not paths or not all(isinstance(path, str) and path for path in paths):
        raise ValueError("expected a path, or a list of paths")
    return paths


def _read_paths_or_null(value: object) -> object:
    return None if value is None else _read_paths(value)


def _read_buckets(value: object) -> object:
    if value is None:
        return None
    if not isinstance(value, list) or not value:
        raise ValueError("expected a list of [frames, height, width]")
    shapes = []
    for item in value:
        if not isinstance(item, (list, tuple)) or len(item) != 3:
            raise ValueError(f"{show(item)} isn't [frames, height, width]")
        shape = tuple(read_int(number) for number in item)
        if not all(0 < number < _LONGEST for number in shape):
            raise ValueError(f"{show(item)}: expected numbers above 0")
        if shape in shapes:
            raise ValueError(f"{show(item)} is there twice")
        shapes.append(shape)
    return shapes


def _read_methods(value: object) -> object:
    """[{"method": name}], one such object, or names."""
    names = []
    for item in value if isinstance(value, list) else [value]:
        name = item.get("method") if isinstance(item, Mapping) else item
        if name not in _TEXT_METHODS:
            near = did_you_mean(name, _TEXT_METHODS) if isinstance(name, str) else ""
            raise ValueError(f"method {show(name)}: expected {' or '.join(_TEXT_METHODS)}{near}")
        names.append(name)
    return names


_TOKENIZER_KEYS = "dataset_param.tokenizer_config."
#: the directory determines the class; `settle_caption_length` gives model_max_length to the text encoder
_TOKENIZER_READ = ("from_pretrained", "hub_backend", "autotokenizer_name", "model_max_length")


def _read_tokenizers(value: object) -> object:
    if value is None:
        return None
    objects = [value] if isinstance(value, Mapping) else value
    if not isinstance(objects, list) or not all(isinstance(item, Mapping) for item in objects):
        raise ValueError("expected an object with from_pretrained, or a list of them")
    known = {path.removeprefix(_TOKENIZER_KEYS) for path in published_paths("data") if path.startswith(_TOKENIZER_KEYS)}
    for item in objects:
        for key in item:
            if key not in known:
                raise ValueError(f"unknown key '{key}'{did_you_mean(str(key), known)}")
    return [dict(item) for item in objects]


class GenerationBasicParameters(Section):
    """Which rows."""

    data_path: Annotated[list[str], BeforeValidator(_read_paths)] = Field(
        description="annotation file(s): json, jsonl, csv or parquet; combine: a text file of `media_root,annotation`; "
        "feature: the folder or index of features"
    )
    data_folder: str = Field("", description="folder that paths of rows are relative to")
    data_storage_mode: Annotated[str, one_of(("standard", "combine"), ("vace",))] = Field(
        "standard", description="combine: data_path lists annotation files, each with its own folder of media"
    )
    max_samples: Annotated[int | None, BeforeValidator(read_row_limit)] = Field(
        None, description="upper bound on the rows of each annotation file; null or -1 = all"
    )
    val_data_path: Annotated[list[str] | None, BeforeValidator(_read_paths_or_null)] = Field(
        None, description="validation rows, written like data_path"
    )
    val_rate: Annotated[Float, Field(ge=0, lt=1)] | None = Field(
        None, description="share of the rows of data_path that is kept for validation instead"
    )
    on_bad_sample: Annotated[str, one_of(("raise", "skip"))] = Field(
        "skip", description="a row or a clip that can't be used ends the run, or is left out and counted"
    )

    @model_validator(mode="after")
    def _one_validation_source(self) -> GenerationBasicParameters:
        if self.val_data_path and self.val_rate:
            raise ValueError(
                f"'val_data_path' and 'val_rate' {self.val_rate} are both given; keep the one that says where "
                "the validation rows come from"
            )
        return self


class TrainPipeline(Section):
    """Steps from decoded frames to the model's input; null = resize to cover, cut the middle, scale to [-1, 1]."""

    video: Annotated[list[dict[str, Any]] | None, BeforeValidator(read_steps)] = Field(
        None, description="steps of clips: a list of {trans_type, param}"
    )
    image: Annotated[list[dict[str, Any]] | None, BeforeValidator(read_steps)] = Field(
        None, description="steps of pictures"
    )
    video_and_first_frame: Annotated[list[dict[str, Any]] | None, BeforeValidator(read_steps)] = Field(
        None, description="steps of clips, where the first frame used to go another way afterwards"
    )
    video_only: Annotated[list[dict[str, Any]] | None, BeforeValidator(read_steps)] = Field(
        None, description="steps of clips after video_and_first_frame"
    )

    @model_validator(mode="after")
    def _one_way(self) -> TrainPipeline:
        if self.video is not None and (self.video_only is not None or self.video_and_first_frame is not None):
            raise ValueError("'video' and 'video_only' or 'video_and_first_frame' are both given; keep one of the two")
        return self

    @property
    def of_clips(self) -> list[dict[str, Any]] | None:
        """The steps of clips."""
        if self.video_only is None and self.video_and_first_frame is None:
            return self.video
        return [*(self.video_and_first_frame or []), *(self.video_only or [])]


class GenerationPreprocessParameters(Section):
    """Frames, sizes and captions."""

    num_frames: Count = Field(16, description="most frames of a clip: k × the autoencoder's temporal stride + 1")
    min_num_frames: Count | None = Field(
        None, description="shorter clips are left out; between it and num_frames clips are halved; null = num_frames"
    )
    train_fps: Annotated[Float, Field(gt=0)] | None = Field(
        None, description="frames taken of a second; null or more than the clip has = its own rate"
    )
    frame_interval: Annotated[Float, Field(gt=0)] = Field(1.0, description="of these, every so many is taken")
    speed_factor: Annotated[Float, Field(gt=0)] = Field(1.0, description="clips are shown so many times faster")
    auto_interval: Bool = Field(False, description="a clip too short for num_frames is taken in smaller steps")
    drop_short_ratio: Annotated[Float, Field(ge=0, le=1)] = Field(
        0.0, description="share of the clips shorter than num_frames that is left out"
    )
    zero_start: Bool = Field(False, description="clips begin with their first frame; false = anywhere")
    keep_last: Bool = Field(False, description="clips end with their last frame")
    max_height: Count = Field(480, description="height in pixels")
    max_width: Count = Field(640, description="width in pixels")
    force_resolution: Bool = Field(True, description="one size: max_height × max_width; false, with max_hxw = several")
    max_hxw: Count | None = Field(None, description="with force_resolution false: largest area of a bucket, in pixels")
    min_hxw: Size = Field(0, description="clips of a smaller area, in pixels, are left out")
    hw_stride: Count = Field(1, description="sides of buckets are multiples of this (and of what the model asks)")
    hw_aspect_thr: Annotated[Float, Field(ge=1)] | None = Field(
        None, description="clips whose sides are in a ratio further off than this factor are left out"
    )
    buckets: Annotated[list[tuple[int, int, int]] | None, BeforeValidator(_read_buckets)] = Field(
        None, description="shapes [frames, height, width] in place of num_frames, max_height, max_width and max_hxw"
    )
    cfg: Annotated[Float, Field(ge=0, le=1)] = Field(
        0.1, description="share of captions that are left out, so that guidance can be used; model.json comes first"
    )
    use_aesthetic: Bool = Field(False, description="must be false: scores aren't written into captions")
    train_pipeline: TrainPipeline = Field(TrainPipeline(), description="steps from frames to the model's input")
    media_timeout: Annotated[Float, Field(gt=0)] = Field(60.0, description="seconds that reading one clip may take")
    trust_remote_code: Bool = Field(False, description="the same as --trust-remote-code, for the whole run")
    media_max_pixels: Count = Field(MEDIA_MAX_PIXELS, description=MEDIA_MAX_PIXELS_IS)

    @model_validator(mode="after")
    def _frames_in_order(self) -> GenerationPreprocessParameters:
        if self.min_num_frames is not None and self.min_num_frames > self.num_frames:
            raise ValueError(
                f"'min_num_frames' {self.min_num_frames} is more than 'num_frames' {self.num_frames}; exchange them"
            )
        if self.keep_last and self.zero_start:
            raise ValueError("'zero_start' and 'keep_last' are both true; a clip can't be fixed at both ends, keep one")
        return self


class GenerationDatasetParam(Section):
    """`dataset_param`."""

    dataset_type: Annotated[str, one_of(GENERATION_TYPES)] = Field(
        description="t2v, i2v: clips (and pictures among them); t2i: pictures; feature: what was made of them before"
    )
    basic_parameters: GenerationBasicParameters = Field(description="which rows")
    preprocess_parameters: GenerationPreprocessParameters = Field(
        GenerationPreprocessParameters(), description="frames, sizes and captions"
    )
    tokenizer_config: Annotated[list[dict[str, Any]] | None, BeforeValidator(_read_tokenizers)] = Field(
        None,
        description="from_pretrained: directory of the tokenizer, where model.json names none; model_max_length: "
        "text_encoder.max_length, where model.json names none; one or a list",
    )
    enable_text_preprocessing: Bool = Field(False, description="clean captions by text_preprocess_methods")
    text_preprocess_methods: Annotated[list[str], BeforeValidator(_read_methods)] = Field(
        list(_TEXT_METHODS), description="basic_clean: HTML entities and broken characters; whitespace_clean"
    )

    @property
    def why_no_validation(self) -> str | None:
        """A clause about the keys that give no validation rows; None: there are some."""
        if self.basic_parameters.val_data_path or self.basic_parameters.val_rate:
            return None
        return "'dataset_param.basic_parameters' has no val_data_path or val_rate; give one of them"

    @property
    def tokenizer_dirs(self) -> list[str | None]:
        """`from_pretrained` of each tokenizer, in order."""
        return [item.get("from_pretrained") for item in self.tokenizer_config or []]


class GenerationDataloaderParam(DataloaderParam):
    """`dataloader_param`. Batch sizes, workers and the seed come from flags."""

    dataloader_mode: Annotated[str, one_of(("sampler", "base", "variable"), ("custom",))] = Field(
        "sampler", description="rows are always sharded over the data-parallel ranks"
    )
    sampler_type: Annotated[str, one_of(GENERATION_SAMPLERS, GENERATION_SAMPLERS_NOT_YET)] = Field(
        "BaseRandomBatchSampler", description="SequentialSampler: file order; the others are the same: by bucket"
    )


class GenerationDataConfig(Section):
    """data.json of a generation model, typed."""

    dataset_param: GenerationDatasetParam = Field(description="which rows are read, and how")
    dataloader_param: GenerationDataloaderParam = Field(GenerationDataloaderParam(), description="how they are batched")

    _file: str = PrivateAttr(default="data.json")

    @property
    def file(self) -> str:
        """Name of the file, for messages."""
        return self._file

    @classmethod
    def from_dict(cls, mapping: object, file: str | None = None) -> GenerationDataConfig:
        """Type the content of data.json, and log which published keys have no effect here.

        Args:
            mapping: ConfigReader or dict.
            file: name to use in messages.

        Raises:
            ConfigError: unknown or missing keys, wrong values, dataset types of other scripts.
        """
        if isinstance(mapping, cls):
            return mapping
        file = file or getattr(mapping, "config_file", None) or "data.json"
        data = plain(mapping)
        param = data.get("dataset_param") if isinstance(data, Mapping) else None
        kind = param.get("dataset_type") if isinstance(param, Mapping) else None
        if isinstance(kind, str) and (problem := dataset_type_problem(kind, file, GENERATION_TYPES)):
            raise ConfigError(problem)
        config, keys = build_section(cls, data, file, "data.json", published_paths("data"), "data")
        given = _given(config)
        raise_all(refusals({**keys.published, **given}, REFUSED_GENERATION_DATA_KEYS, file))
        inert = ("dataloader_param.priority_mode", "dataloader_param.collate_param.")
        no_effect = [*keys.published, *(path for path in given if path.startswith(inert))]
        tokenizers = config.dataset_param.tokenizer_config or []
        no_effect += {_TOKENIZER_KEYS + key for item in tokenizers for key in item if key not in _TOKENIZER_READ}
        if kind == "feature":
            no_effect += [path for path in given if path.removeprefix("dataset_param.").startswith(_OF_CLIPS)]
            of_use = [f"dataset_param.preprocess_parameters.{key}" for key in ("cfg", "trust_remote_code")]
            no_effect = [path for path in no_effect if path not in of_use]
        log_no_effect(sorted(no_effect), _OF_FEATURES if kind == "feature" else IDLE_GENERATION_DATA_KEYS, file)
        config._file = file
        return config


#: what features don't need any more
_OF_CLIPS = (
    "preprocess_parameters",
    "enable_text",
    "text_preprocess",
    "tokenizer_config",
    "basic_parameters.data_storage",
)
_OF_FEATURES = (
    *(rule for rule in IDLE_GENERATION_DATA_KEYS if rule.pattern.startswith("dataloader_param")),
    IDLE_GENERATION_DATA_KEYS[-1]._replace(why="it was of use when the features were made"),
)


def is_generation_data(mapping: object) -> bool:
    """Whether the content of a data.json is of a dataset type that `GenerationDataConfig` describes."""
    data = plain(mapping)
    param = data.get("dataset_param") if isinstance(data, Mapping) else None
    return isinstance(param, Mapping) and param.get("dataset_type") in GENERATION_TYPES


def _given(section: Section, prefix: str = "") -> dict[str, Any]:
    """Dotted path → value of what a file gives."""
    values: dict[str, Any] = {}
    for name in section.model_fields_set:
        value, path = getattr(section, name), f"{prefix}{name}"
        values.update(_given(value, path + ".") if isinstance(value, Section) else {path: value})
    return values
