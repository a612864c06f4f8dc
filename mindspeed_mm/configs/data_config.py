"""`data.json`: which rows are trained on, how they are read, and how they are batched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from mindspeed_mm.configs.corpus_config import CorpusParameters, corpus_problem
from mindspeed_mm.configs.data_rules import (
    COLLATORS,
    IDLE_DATA_KEYS,
    MODELS_OWN_TEMPLATES,
    REFUSED_DATA_KEYS,
    SAMPLERS,
    SAMPLERS_NOT_YET,
)
from mindspeed_mm.configs.generation_steps import read_steps
from mindspeed_mm.configs.multimodal_data import translated_dataset_param
from mindspeed_mm.configs.other_scripts import DATASET_TYPES, OLDER_TYPES, dataset_type_problem
from mindspeed_mm.configs.published import is_given, log_no_effect, published_paths, refusals, warn_of_near_keys
from mindspeed_mm.configs.reader import ConfigReader
from mindspeed_mm.configs.scalars import read_int, show
from mindspeed_mm.configs.sections import (
    Bool,
    Count,
    Float,
    Section,
    SectionT,
    Size,
    SortedKeys,
    build_section,
    given_values,
    key_paths,
    one_of,
    plain,
    raise_all,
    sort_keys,
    unknown_key_problems,
)
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.log import notice

#: what Pillow accepts by default
MEDIA_MAX_PIXELS = 178_956_970
MEDIA_MAX_PIXELS_IS = "an image, or a frame of a video, with more pixels in its file can't be used: it costs memory"


def _read_names(value: object) -> object:
    """Comma separated text of names, an entry as a registry has them, or a list of both."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",")]
    elif isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list) or not value or not all(isinstance(p, (str, Mapping)) and p for p in value):
        raise ValueError(
            "expected a path or a name of dataset_info.json, several separated by commas, or a list of them, or an "
            "object with file_name, formatting, columns …"
        )
    return [part if isinstance(part, str) else dict(part) for part in value]


def _read_names_or_null(value: object) -> object:
    return None if value is None else _read_names(value)


def _read_template(value: object) -> object:
    """A template's name; null for those that a family's models bring with them."""
    if value not in MODELS_OWN_TEMPLATES:
        return value
    notice(f"basic_parameters.template {value}: the chat template of the model's own directory is used")
    return None


def read_row_limit(value: object) -> int | None:
    """An upper bound on rows; null and -1 mean all of them."""
    if value is None:
        return None
    number = read_int(value)
    if number == -1:
        return None
    if number < 1:
        raise ValueError("expected at least 1 row; null or -1 means all rows")
    return number


def _read_probabilities(value: object) -> object:
    """Comma separated text, or a list, of numbers above 0."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",")]
    if value is None:
        return None
    try:
        numbers = [float(item) for item in value] if isinstance(value, (list, tuple)) else []
    except (TypeError, ValueError):
        numbers = []
    if not numbers or not all(0 < number < float("inf") for number in numbers):
        raise ValueError("expected numbers above 0, comma separated or in a list")
    return numbers


#: data sets, as text or as a list
Names = Annotated[list[str | dict[str, Any]], BeforeValidator(_read_names)]
MaybeNames = Annotated[list[str | dict[str, Any]] | None, BeforeValidator(_read_names_or_null)]
#: of several data sets
Shares = Annotated[list[float] | None, BeforeValidator(_read_probabilities)]


def _read_val_limit(value: object) -> int | None:
    """Like a row limit, but 0 is allowed: no validation rows."""
    return 0 if value is not None and read_int(value) == 0 else read_row_limit(value)


class DatasetAttr(Section):
    """How the columns of a row are called. A null tag means that the rows have no such role."""

    formatting: Annotated[str, one_of(("sharegpt", "alpaca", "openai", "multimodal_tool"))] = Field(
        "sharegpt",
        description="shape of a row: alpaca (columns), else a list of turns; openai has its own defaults of names",
    )
    messages: str = Field("conversations", description="sharegpt: column with the list of turns")
    role_tag: str = Field("from", description="sharegpt: key of a turn's role")
    content_tag: str = Field("value", description="sharegpt: key of a turn's content")
    user_tag: str = Field("human", description="sharegpt: role of the user")
    assistant_tag: str = Field("gpt", description="sharegpt: role of the assistant")
    observation_tag: str | None = Field("observation", description="sharegpt: role of a tool's result")
    function_tag: str | None = Field("function_call", description="sharegpt: role of a tool call")
    system_tag: str | None = Field("system", description="sharegpt: role of the system")
    prompt: str | None = Field(None, description="alpaca: column with the instruction")
    query: str | None = Field(None, description="alpaca: column with the rest of the user's turn")
    response: str | None = Field(None, description="column with the answer; of a list of turns: with its last turns")
    history: str | None = Field(None, description="alpaca: column with earlier turns")
    system: str | None = Field(None, description="column with the system text")
    tools: str | None = Field(None, description="column with the tools")
    images: str | None = Field(None, description="column with image paths")
    videos: str | None = Field(None, description="column with video paths")
    audios: str | None = Field(None, description="column with audio paths")
    chosen: str | None = Field(None, description="column with the preferred answer")
    rejected: str | None = Field(None, description="column with the other answer")
    ranking: Bool = Field(False, description="rows are preference pairs; they are read, training on them is not there")
    pretrain: Bool = Field(False, description="rows are plain text (alpaca: the prompt column); all of it is trained")
    packing: Bool = Field(False, description="the same as basic_parameters.packing")

    def resolved(self) -> DatasetAttr:
        """Return it with the names that its formatting has by itself, where none is given."""
        if self.formatting != "openai":
            return self
        return self.model_copy(
            update={key: value for key, value in _OPENAI_NAMES.items() if key not in self.model_fields_set}
        )

    def for_text(self) -> DatasetAttr:
        """Return it for rows of plain text: the prompt column, "text" where none is named."""
        return self if self.prompt else self.model_copy(update={"prompt": "text"})


_OPENAI_NAMES = {
    "messages": "messages",
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
}


class BasicParameters(Section):
    """Which rows, and how a row becomes tokens and targets."""

    dataset: Names = Field(
        description="data file, folder, pattern or name in dataset_info.json; several separated by commas, or a list; "
        "an object is an entry like those of that file"
    )
    dataset_dir: str = Field(
        "data", description="folder of dataset_info.json, and that relative paths of files and media are joined to"
    )
    stage: Annotated[str, one_of(("sft", "pretrain", "pt"), ("rm",))] = Field(
        "sft", description="pretrain, pt: rows are plain text (attr.prompt, else the column text); all is trained"
    )
    template: Annotated[str | None, BeforeValidator(_read_template)] = Field(
        None, description="name of a chat template; null = the processor's own"
    )
    cutoff_len: Count | None = Field(None, description="longest row in tokens, when --seq-length is absent")
    max_samples: Annotated[int | None, BeforeValidator(read_row_limit)] = Field(
        None, description="upper bound on the rows of each data set; null or -1 = all; 0 is refused"
    )
    train_on_prompt: Bool = Field(False, description="prompts are targets too")
    mask_history: Bool = Field(False, description="only the last answer of a row is a target")
    enable_thinking: Bool = Field(True, description="passed to the chat template")
    tool_format: str | None = Field(None, description="how tool calls are written; null = as the chat template does")
    val_dataset: MaybeNames = Field(None, description="validation data set(s), written like `dataset`")
    val_rate: Annotated[Float, Field(ge=0, lt=1)] | None = Field(
        None, description="share of the rows of `dataset` that is kept for validation instead"
    )
    val_size: Count | None = Field(None, description="ours: rows of `dataset` that are kept for validation instead")
    val_max_samples: Annotated[int | None, BeforeValidator(_read_val_limit)] = Field(
        None, description="upper bound on validation rows; null or -1 = all; 0 = no validation"
    )
    streaming: Bool = Field(False, description="rows are found while training goes on; shuffled within a buffer")
    buffer_size: Count = Field(16384, description="streaming: rows that the shuffle buffer holds")
    packing: Bool = Field(False, description="several samples share a row of the batch, up to the length limit")
    neat_packing: Bool = Field(False, description="the same: samples of a row never see each other")
    mix_strategy: Annotated[str, one_of(("concat", "interleave_under", "interleave_over"))] = Field(
        "concat", description="several data sets: one after the other, or drawn until the first / the last has ended"
    )
    interleave_probs: Shares = Field(
        None, description="interleaving: share of each data set, comma separated or a list; null = equal shares"
    )
    default_system: str | None = Field(None, description="system text of rows that have none")
    on_bad_sample: Annotated[str, one_of(("raise", "skip"))] = Field(
        "raise", description="a row or a medium that can't be used ends the run, or is left out and counted"
    )
    preprocess_on_fly: Bool | None = Field(
        None, description="false: tokens are made once, before training, and kept in cache_dir; null = true"
    )
    cache_dir: str | None = Field(None, description="folder of that cache")
    overwrite_cache: Bool = Field(False, description="make the cache anew")
    preprocessing_num_workers: Count | None = Field(None, description="processes that make the cache")

    @model_validator(mode="after")
    def _one_validation_source(self) -> BasicParameters:
        parts = {"val_rate": self.val_rate, "val_size": self.val_size}
        given = [f"'{key}' {value}" for key, value in parts.items() if value]
        if len(given) + bool(self.val_dataset) > 1:
            every = [*(["'val_dataset'"] if self.val_dataset else []), *given]
            raise ValueError(
                f"{' and '.join(every)} are both given; keep the one that says where the validation rows come from"
            )
        if self.streaming and given:
            key = given[0].split()[0]
            raise ValueError(f"{key} needs the number of rows, which 'streaming' doesn't know; give 'val_dataset'")
        return self


class ProcessorSteps(Section):
    """`train_pipeline`: lists of {"trans_type": name, "param": {…}}, which the processor must agree with."""

    image: Annotated[list[dict[str, Any]] | None, BeforeValidator(read_steps)] = Field(
        None, description="of pictures; absent = as the processor does"
    )
    video: Annotated[list[dict[str, Any]] | None, BeforeValidator(read_steps)] = Field(
        None, description="of frames; absent = as the processor does"
    )


class PreprocessParameters(Section):
    """The processor, and limits on media. An absent limit is the processor's own."""

    model_name_or_path: str = Field(description="directory with the processor, or the tokenizer of a text model")
    use_fast_tokenizer: Bool = Field(True, description="the fast version is always used: exact targets need it")
    split_special_tokens: Bool = Field(False, description="special tokens typed into a text are split like any text")
    trust_remote_code: Bool = Field(False, description="the same as --trust-remote-code, for the whole run")
    fix_mistral_regex: Bool = Field(False, description="repair of Mistral tokenizers' splitting pattern")
    image_max_pixels: Count | None = Field(None, description="larger images are scaled down to this area")
    image_min_pixels: Size | None = Field(None, description="smaller images are scaled up to this area")
    image_do_pan_and_scan: Bool = Field(False, description="the processor's pan-and-scan crops")
    crop_to_patches: Bool | None = Field(
        None, description="the processor's tiling of large images; null = as the processor does by itself"
    )
    min_patches: Count | None = Field(None, description="least tiles of an image, where the processor cuts tiles")
    max_patches: Count | None = Field(None, description="most tiles of an image, where the processor cuts tiles")
    tile_size: Count | None = Field(None, description="side of a tile in pixels; must be the processor's own")
    train_pipeline: ProcessorSteps = Field(
        ProcessorSteps(), description="published steps from pictures to pixel values; must be what the processor does"
    )
    video_max_pixels: Count | None = Field(None, description="larger frames are scaled down to this area")
    video_min_pixels: Size | None = Field(None, description="smaller frames are scaled up to this area")
    video_fps: Annotated[Float, Field(gt=0)] | None = Field(None, description="frames a second taken from a video")
    video_maxlen: Count | None = Field(None, description="most frames taken from one video")
    use_audio_in_video: Bool = Field(False, description="must be false: a video's sound is not read")
    audio_sampling_rate: Count | None = Field(None, description="samples a second that audio is converted to, in Hz")
    max_aspect_ratio: Annotated[Float, Field(ge=1)] | None = Field(
        None, description="an image or video whose longer side is more times the shorter can't be used"
    )
    image_decoder: Annotated[str, one_of(("pil", "fast"))] = Field(
        "pil", description="fast: large JPEG files are decoded at a smaller size; pixels differ slightly"
    )
    media_timeout: Annotated[Float, Field(gt=0)] = Field(60.0, description="seconds that reading one medium may take")
    media_max_pixels: Count = Field(MEDIA_MAX_PIXELS, description=MEDIA_MAX_PIXELS_IS)


_NO_DRAWN_FRAMES = "not there: a video ends the run while it is given"


class DatasetParam(Section):
    """`dataset_param`."""

    dataset_type: Annotated[str, one_of(("huggingface", "multimodal", "corpus"), tuple(DATASET_TYPES))] = Field(
        description="huggingface; multimodal: basic_parameters are data_path, data_folder and repeat_time, or a list; "
        "corpus (ours): documents for pretraining, through Megatron-core's GPTDataset"
    )
    basic_parameters: BasicParameters = Field(description="rows and targets")
    preprocess_parameters: PreprocessParameters = Field(description="processor and media limits")
    attr: DatasetAttr = Field(DatasetAttr(), description="names of columns and roles")
    corpus: CorpusParameters | None = Field(None, description="ours: dataset_type corpus: rows out of documents")
    sampling_method: str | None = Field(None, description=f"how frames are drawn from a video; {_NO_DRAWN_FRAMES}")
    min_num_frame: Count | None = Field(None, description=f"least frames drawn from a video; {_NO_DRAWN_FRAMES}")
    max_num_frame: Count | None = Field(None, description=f"most frames drawn from a video; {_NO_DRAWN_FRAMES}")

    @model_validator(mode="after")
    def _is_a_corpus_or_not(self) -> DatasetParam:
        if problem := corpus_problem(self.dataset_type, self.basic_parameters, self.corpus):
            raise ValueError(problem)
        return self

    @property
    def why_no_validation(self) -> str | None:
        """A clause about the keys that give no validation rows; None: there are some."""
        basic, corpus = self.basic_parameters, self.corpus or CorpusParameters()
        if self.dataset_type == "corpus":
            shares = ",".join(f"{share:g}" for share in corpus.split)
            return None if corpus.split[1] else f"'dataset_param.corpus.split' is {shares}; expected a second share"
        if basic.val_max_samples == 0:
            return "'dataset_param.basic_parameters.val_max_samples' is 0; expected null or a number of rows"
        if basic.val_dataset or basic.val_rate or basic.val_size:
            return None
        return "'dataset_param.basic_parameters' has no val_dataset, val_rate or val_size; give one of them"

    @property
    def draws_frames(self) -> list[str]:
        """The keys given that ask for frames drawn by number, which isn't there."""
        keys = ("sampling_method", "min_num_frame", "max_num_frame")
        return [key for key in keys if getattr(self, key) is not None]

    @classmethod
    def from_dict(cls, mapping: object, file: str | None = None) -> DatasetParam:
        """Type `dataset_param` alone, as `DataConfig.from_dict` types the whole file."""
        return _part_from_dict(cls, "dataset_param", mapping, file)


class CollateParam(Section):
    """`dataloader_param.collate_param`. One collator serves all families; the published names are accepted."""

    model_name: Annotated[str | None, one_of(COLLATORS)] = Field(None, description="published collator name")
    collator_id: Annotated[str | None, one_of(COLLATORS)] = Field(None, description="the same, by its other name")
    ignore_pad_token_for_loss: Bool = Field(True, description="padding is never a target, whatever this says")
    pad_id: Size | None = Field(None, description="token used as padding; null = the tokenizer's own")
    pad_to_multiple_of: Count | None = Field(None, description="row length of a batch is rounded up to a multiple")

    @model_validator(mode="after")
    def _one_name(self) -> CollateParam:
        if self.model_name and self.collator_id and self.model_name != self.collator_id:
            raise ValueError(f"'model_name' is '{self.model_name}' and 'collator_id' '{self.collator_id}'; keep one")
        return self


class DataloaderParam(Section):
    """`dataloader_param`. Batch sizes, workers and the seed come from flags."""

    dataloader_mode: Annotated[str, one_of(("sampler", "base"), ("variable", "custom"))] = Field(
        "sampler", description="rows are always sharded over the data-parallel ranks"
    )
    sampler_type: Annotated[str, one_of(SAMPLERS, SAMPLERS_NOT_YET)] = Field(
        "BaseRandomBatchSampler", description="stateful_distributed_sampler is the same; SequentialSampler: file order"
    )
    priority_mode: Annotated[str, one_of(("data_bucketing_img", "data_reordering_img"))] | None = Field(
        None, description="BucketBatchSampler: rows of like image cost come together / are spread evenly"
    )
    shuffle: Bool | None = Field(
        None, description="new order every epoch; null = true, with SequentialSampler false (its only value)"
    )
    drop_last: Bool = Field(True, description="leave out the rows that don't fill a global batch at an epoch's end")
    pin_memory: Bool = Field(False, description="batches in pinned host memory")
    prefetch_factor: Count | None = Field(None, description="micro-batches each worker prepares in advance")
    persistent_workers: Bool = Field(True, description="workers are kept from epoch to epoch")
    collate_param: CollateParam = Field(CollateParam(), description="padding of a batch")

    @model_validator(mode="after")
    def _sequential_does_not_shuffle(self) -> DataloaderParam:
        if self.sampler_type == "SequentialSampler" and self.shuffle:
            raise ValueError("'sampler_type' is 'SequentialSampler' and 'shuffle' is true; change one of the two")
        return self

    @classmethod
    def from_dict(cls, mapping: object, file: str | None = None) -> DataloaderParam:
        """Type `dataloader_param` alone, as `DataConfig.from_dict` types the whole file."""
        return _part_from_dict(cls, "dataloader_param", mapping, file)

    @property
    def shuffles(self) -> bool:
        """`shuffle`, with null resolved."""
        return self.sampler_type != "SequentialSampler" if self.shuffle is None else self.shuffle


class DataConfig(Section):
    """data.json, typed."""

    dataset_param: DatasetParam = Field(description="which rows are read, and how")
    dataloader_param: DataloaderParam = Field(DataloaderParam(), description="how it is batched")

    @model_validator(mode="after")
    def _a_corpus_is_shuffled(self) -> DataConfig:
        if self.dataset_param.dataset_type == "corpus" and not self.dataloader_param.shuffles:
            raise ValueError(
                "'dataloader_param.shuffle' is false and 'dataset_param.dataset_type' corpus: a corpus is shuffled by "
                "--seed; write true"
            )
        return self

    @classmethod
    def from_dict(cls, mapping: object, file: str | None = None) -> DataConfig:
        """Type the content of data.json, and log which published keys have no effect here.

        Args:
            mapping: ConfigReader or dict.
            file: name to use in messages.

        Raises:
            ConfigError: unknown or missing keys, wrong values, things that are not there yet.
        """
        if isinstance(mapping, cls):
            return mapping
        file = file or getattr(mapping, "config_file", None) or "data.json"
        data = plain(mapping)
        _refuse_other_dataset_types(cls, data, file)
        if isinstance(data, Mapping) and "dataset_param" in data:
            data = {**data, "dataset_param": translated_dataset_param(data["dataset_param"], file)}
        config, keys = build_section(cls, data, file, "data.json", published_paths("data"), "data")
        _judge(config, keys, file)
        return config


def _part_from_dict(cls: type[SectionT], name: str, mapping: object, file: str | None) -> SectionT:
    if isinstance(mapping, cls):
        return mapping
    file = file or getattr(mapping, "config_file", None) or "data.json"
    data = plain(mapping)
    if cls is DatasetParam:
        _refuse_other_dataset_types(DataConfig, {name: data}, file)
        data = translated_dataset_param(data, file)
    start = name + "."
    published = [path.removeprefix(start) for path in published_paths("data") if path.startswith(start)]
    section, keys = build_section(cls, data, file, "data.json", published)
    _judge(section, keys, file, start)
    return section


def _judge(section: Section, keys: SortedKeys, file: str, start: str = "") -> None:
    """Refuse what isn't there yet, and log what has no effect: the parts apart, so that each is logged once."""
    no_effect = {start + path: value for path, value in keys.published.items()}
    given = no_effect | given_values(section, start)
    raise_all([*refusals(given, REFUSED_DATA_KEYS, file), *_older_limits(given, file)])
    loader = [path for path in no_effect if path.startswith("dataloader_param.")]
    log_no_effect(loader, IDLE_DATA_KEYS, file)
    log_no_effect([path for path in no_effect if path not in loader], IDLE_DATA_KEYS, file)


def _older_limits(given: Mapping[str, Any], file: str) -> list[str]:
    """Sentences about limits on media in older words, where the ones that count aren't given."""
    start = "dataset_param.preprocess_parameters."
    return [
        f"{file}: '{start}{kind}_resolution' is {show(older)}; write {kind}_max_pixels, which is an area"
        for kind in ("image", "video")
        if is_given(older := given.get(f"{start}{kind}_resolution")) and given.get(f"{start}{kind}_max_pixels") is None
    ]


def _refuse_other_dataset_types(cls: type[Section], data: object, file: str) -> None:
    """Refuse a file for another dataset type; its unknown keys are reported first."""
    dataset_param = data.get("dataset_param") if isinstance(data, Mapping) else None
    dataset_type = dataset_param.get("dataset_type") if isinstance(dataset_param, Mapping) else None
    if not isinstance(data, Mapping) or dataset_type not in (*DATASET_TYPES, *OLDER_TYPES):
        return
    published = published_paths("data")
    unknown = sort_keys(cls, data, published).unknown
    fields = key_paths(cls)
    raise_all(unknown_key_problems("data", file, unknown, fields, published))
    raise ConfigError(str(dataset_type_problem(str(dataset_type), file)))


def warn_of_near_data_keys(mapping: ConfigReader | Mapping[str, Any], file: str | None = None) -> None:
    """Log which keys in the data.json of a script with its own data sets look like misspelt known ones."""
    warn_of_near_keys(DataConfig, plain(mapping), file or "data.json", published_paths("data"))
