"""A launch of inference_vlm.py as one typed description; nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mindspeed_mm.configs.data_config import DataConfig, DatasetParam
from mindspeed_mm.configs.files import describe_missing, read_json
from mindspeed_mm.configs.flags import GROUPS
from mindspeed_mm.configs.flags.parser import build_parser, spell_as_declared, stray_words, unknown_flags
from mindspeed_mm.configs.flags.spec import flags_of
from mindspeed_mm.configs.fsdp2_config import Fsdp2Config, load_fsdp2_config
from mindspeed_mm.configs.hf_directory import describe_missing_model
from mindspeed_mm.configs.model_config import TransformersModelConfig
from mindspeed_mm.configs.sections import raise_all
from mindspeed_mm.configs.vlm_config import VLMModelConfig
from mindspeed_mm.configs.vlm_inference import AnswerConfig, AnswerFlags, is_yaml
from mindspeed_mm.tasks.inference.settings import GenerationSettings, PlainPrompt
from mindspeed_mm.tasks.inference.source import ModelSource, find_model
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.extras import require_extra
from mindspeed_mm.utils.files import refuse_unwritable
from mindspeed_mm.utils.launch import this_launch
from mindspeed_mm.utils.log import notice

if TYPE_CHECKING:
    from mindspeed_mm.data.media.media import MediaKind

AnswerFlagsT = TypeVar("AnswerFlagsT", bound=AnswerFlags)

_SEED = 42
_LIMITS = ("image_max_pixels", "image_min_pixels", "video_max_pixels", "video_min_pixels", "video_fps", "video_maxlen")
#: flags of training that say something here
_SHARED = (
    *(
        "bf16",
        "fp16",
        "use_torch_fsdp2",
        "fsdp2_config_path",
        "trust_remote_code",
        "micro_batch_size",
        "allow_tf32",
        "dry_run",
        "dry_run_world_size",
    ),
    *(
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "distributed_backend",
        "distributed_timeout_minutes",
    ),
)


@dataclass(frozen=True)
class AnswerRun:
    """What a launch asks for.

    Attributes:
        source: where the model is.
        param: processor, template, limits of media, and files of rows.
        prompts: what is answered; None: the rows of `param`'s files.
        settings: how answers are generated.
        model: kernels and plugins of a training's model.json; None: it has none.
        numbers: the model's numbers of a published file; None: it has none.
        output: file of answers; None: standard output.
        overwrite: whether an earlier run's answers are replaced.
        system: system text of prompts without one.
        dtype: bf16, fp16 or fp32; None: the directory's, or fp32 on the host.
        allow_tf32: whether float32 products are computed in the device's shorter format.
        sharding: how parameters are sharded over the processes; None: each process holds the model.
        averaged: whether the averages of a checkpoint are taken.
        merge_adapter: whether a PEFT adapter is added to its base's weights.
        trust_remote_code: whether code of directories may run.
        distributed_backend, timeout_minutes: of collectives.
        plugins: modules to import first.
        processes: number of processes, or that of the launch that a dry run is about.
    """

    source: ModelSource
    param: DatasetParam
    prompts: tuple[PlainPrompt, ...] | None
    settings: GenerationSettings
    model: TransformersModelConfig | None = None
    numbers: VLMModelConfig | None = None
    output: Path | None = None
    overwrite: bool = False
    system: str | None = None
    dtype: str | None = None
    allow_tf32: bool = False
    sharding: Fsdp2Config | None = None
    averaged: bool = False
    merge_adapter: bool = False
    trust_remote_code: bool = False
    distributed_backend: str | None = None
    timeout_minutes: float = 10.0
    plugins: tuple[str, ...] = field(default=())
    processes: int = 1


def describe_answers(words: Sequence[str], *, complete: bool = True, chats: bool = False) -> AnswerRun:
    """Read the words of a launch command and the files that they name.

    Args:
        words: those after the script's name.
        complete: whether the model's directory must have weights and a tokenizer; False: a configuration is enough.
        chats: whether prompts come later, from a conversation.

    Raises:
        ConfigError: unknown flags or keys, wrong values, missing files.
        CheckpointError: there is no model where the launch says.
    """
    flags, shared, config = read_words(words, AnswerFlags)
    if benchmark := sorted(config.evaluation.model_fields_set):
        raise ConfigError(
            f"{config.file}: {', '.join(map(repr, benchmark))}: this file describes a benchmark; launch it with "
            "evaluate_vlm.py"
        )
    return answer_run(flags, shared, config, complete=complete, chats=chats)


def answer_run(
    flags: AnswerFlags,
    shared: Mapping[str, Any],
    config: AnswerConfig,
    *,
    complete: bool = True,
    chats: bool = False,
) -> AnswerRun:
    """Return the description of what the words of a launch and the files that they name ask for.

    Args:
        flags, shared, config: what `read_words` returns.
        complete, chats: as for `describe_answers`.

    Raises:
        ConfigError, CheckpointError: as `describe_answers`.
    """
    keys, inference = config.keys, config.inference
    data = _data(flags.mm_data)
    source = _source(flags, config, data, complete)
    if chats:
        _refuse_in_chat(flags, _settings(flags, config, shared))
    prompts = () if chats else _prompts(flags, config)
    rows = flags.data_path or (None if flags.prompt is not None else inference.data_path)
    param = _param(flags, config, data, source, rows if prompts is None else None)
    if prompts is None and not rows and data is None:
        raise ConfigError(
            "nothing to answer: give --prompt (with --image, --video, --audio), --data-path (a file of rows), or a "
            "data.json (--mm-data) with rows"
        )
    if prompts is None and flags.output is None:
        raise ConfigError("--output is missing: the file of the rows' answers, one JSON object a line")
    if flags.output:
        refuse_unwritable(Path(flags.output).absolute().parent, "--output")
        if Path(flags.output).is_dir():
            raise ConfigError(f"--output '{flags.output}' is a directory; expected a file, such as answers.jsonl")
    return AnswerRun(
        source,
        param,
        prompts,
        _settings(flags, config, shared),
        model=config.model,
        numbers=config.numbers,
        output=Path(flags.output) if flags.output else None,
        overwrite=flags.overwrite,
        system=flags.system,
        dtype=flags.dtype or keys.dtype or ("bf16" if shared.get("bf16") else "fp16" if shared.get("fp16") else None),
        allow_tf32=bool(shared.get("allow_tf32")),
        sharding=_sharding(shared),
        averaged=flags.ema,
        merge_adapter=flags.merge_adapter,
        trust_remote_code=bool(shared.get("trust_remote_code")) or _trusts(config, param),
        distributed_backend=shared.get("distributed_backend"),
        timeout_minutes=shared.get("distributed_timeout_minutes", 10),
        processes=shared.get("dry_run_world_size") or this_launch().world_size,
        plugins=tuple(inference.plugin or (config.model.plugin if config.model is not None else ())),
    )


def read_words(words: Sequence[str], group: type[AnswerFlagsT]) -> tuple[AnswerFlagsT, dict[str, Any], AnswerConfig]:
    """Read the words of a launch command.

    Args:
        words: those after the script's name.
        group: the script's own flags.

    Returns:
        its own flags, those of training that count here too, and what the file says.

    Raises:
        ConfigError: unknown flags or keys, wrong values, missing files.
    """
    file = words[0] if words and is_yaml(words[0]) else None
    parser = build_parser((*GROUPS, group))
    words = spell_as_declared(parser, words[1:] if file else words)
    raise_all(unknown_flags(parser, words))
    parsed, extras = parser.parse_known_args(words)
    raise_all(stray_words(parser, words, extras))
    own, given = {item.name: item for item in flags_of(group)}, vars(parsed)
    if others := sorted(given.keys() - own.keys() - set(_SHARED)):
        _refuse_other_parallelism(given)
        names = ", ".join("--" + name.replace("_", "-") for name in others)
        notice(f"no effect here: {names}: they belong to training")
    flags = group(**{name: value for name, value in given.items() if name in own})
    problems = []
    for name, item in own.items():
        values = getattr(flags, name) if item.path in ("file", "directory") else None
        for value in values if isinstance(values, list) else [values] if values else []:
            if not Path(value).exists():
                describe = describe_missing_model if item.path == "directory" else describe_missing
                problems.append(f"{item.spelling}: {describe(value)}")
    raise_all(problems)
    if file and flags.mm_model:
        raise ConfigError(f"{file} and --mm-model are both given; keep one")
    config = AnswerConfig.from_yaml(file) if file else AnswerConfig()
    if flags.mm_model:
        config = (
            AnswerConfig.from_yaml(flags.mm_model)
            if is_yaml(flags.mm_model)
            else AnswerConfig.from_file(flags.mm_model)
        )
    return flags, {name: given[name] for name in _SHARED if name in given}, config


def _source(flags: AnswerFlags, config: AnswerConfig, data: DatasetParam | None, complete: bool) -> ModelSource:
    """The model that flags or files name."""
    keys, inference = config.keys, config.inference
    load = flags.load or inference.load or keys.tokenizer.from_pretrained
    model_path = config.model.init_from_hf_path if config.model is not None else None
    tokenizer = keys.tokenizer.from_pretrained if flags.load else None
    beside = flags.processor_path or inference.processor_path or tokenizer or model_path or _processor_of(data)
    place, named_by = load or model_path, "--load"
    if not flags.load and place:
        named_by = f"{config.file}: " + (
            "inference.load" if inference.load else "tokenizer.from_pretrained" if load else "init_from_hf_path"
        )
    if place is None:
        raise ConfigError(
            "--load is missing: a HF directory, a run folder, a checkpoint in it, an export or a PEFT adapter; or "
            "--mm-model, a model.json that names one"
        )
    source = find_model(place, step=flags.ckpt_step, beside=beside, named_by=named_by, complete=complete)
    if source.adapter is not None:
        require_extra("lora", f"{named_by} '{source.adapter}': a PEFT adapter")
    return source


def _refuse_in_chat(flags: AnswerFlags, settings: GenerationSettings) -> None:
    for name in ("prompt", "image", "video", "audio", "data_path", "output"):
        if getattr(flags, name) is not None:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} belongs to inference_vlm.py; in a chat, write what you say, and /image PATH")
    if settings.values.get("num_beams", 1) > 1:
        raise ConfigError("num_beams: an answer of a beam search isn't known before its end; leave --num-beams out")


def _refuse_other_parallelism(given: Mapping[str, Any]) -> None:
    for name in ("context_parallel_size", "expert_model_parallel_size", "virtual_pipeline_model_parallel_size"):
        if (given.get(name) or 1) > 1:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{flag} {given[name]}: answers are not generated so; leave it out (--use-torch-fsdp2 shards the "
                "parameters over the processes)"
            )


def _data(path: str | None) -> DatasetParam | None:
    return DataConfig.from_dict(read_json(path), path).dataset_param if path else None


def _processor_of(data: DatasetParam | None) -> str | None:
    return None if data is None else data.preprocess_parameters.model_name_or_path


def _prompts(flags: AnswerFlags, config: AnswerConfig) -> tuple[PlainPrompt, ...] | None:
    """Prompts of the flags, else of model.json unless flags name rows; None: rows are answered."""
    kinds: tuple[tuple[MediaKind, list[str] | None], ...]
    kinds = (("image", flags.image), ("video", flags.video), ("audio", flags.audio))
    media = tuple((kind, path) for kind, paths in kinds for path in paths or ())
    if flags.prompt is not None:
        return (PlainPrompt(flags.prompt, media),)
    if media and flags.data_path:
        raise ConfigError("--image, --video and --audio belong to --prompt; rows name their media themselves")
    if flags.data_path or config.inference.data_path or (flags.mm_data and not config.keys.prompts):
        return None
    texts = config.keys.prompts
    if texts is None:
        return (PlainPrompt("", media),) if media else None
    if media:
        return tuple(PlainPrompt(text, media) for text in texts)
    return tuple(PlainPrompt(text, _media_of(config, number, len(texts))) for number, text in enumerate(texts))


def _media_of(config: AnswerConfig, number: int, count: int) -> tuple[tuple[MediaKind, str], ...]:
    """The media of one of model.json's prompts: a single path is that of every prompt."""
    found: list[tuple[MediaKind, str]] = []
    pairs: tuple[tuple[MediaKind, list[str] | None, str], ...] = (
        ("image", config.keys.image_path, "image_path"),
        ("video", config.keys.video_path, "video_path"),
    )
    for kind, paths, key in pairs:
        if not paths:
            continue
        if count > 1 and len(paths) not in (1, count):
            raise ConfigError(
                f"{config.file}: '{key}' has {len(paths)} paths for {count} prompts; expected one for each"
            )
        chosen = paths if count == 1 else paths[:1] if len(paths) == 1 else [paths[number]]
        for path in chosen:
            if not Path(path).exists():
                raise ConfigError(f"{config.file}: '{key}': {describe_missing(path)}")
        found += [(kind, path) for path in chosen]
    return tuple(found)


def _param(
    flags: AnswerFlags, config: AnswerConfig, data: DatasetParam | None, source: ModelSource, rows: str | None
) -> DatasetParam:
    """data.json's parameters, with what flags and keys say about the processor, the template and media."""
    limits: dict[str, Any] = {"image_min_pixels": config.keys.min_pixels, "image_max_pixels": config.keys.max_pixels}
    limits |= {name: value for name in _LIMITS if (value := getattr(flags, name)) is not None}
    preprocess: dict[str, Any] = {name: value for name, value in limits.items() if value is not None}
    preprocess["model_name_or_path"] = str(source.processor)
    thinks = flags.enable_thinking if flags.enable_thinking is not None else config.inference.enable_thinking
    basic: dict[str, Any] = {"template": flags.template, "enable_thinking": thinks, "default_system": flags.system}
    basic = {name: value for name, value in basic.items() if value is not None}
    if rows is not None:
        basic |= {"dataset": [rows], "dataset_dir": data.basic_parameters.dataset_dir if data is not None else ""}
    if data is None:
        basic.setdefault("dataset", ["no rows"])
        content = {"basic_parameters": basic, "preprocess_parameters": preprocess, "dataset_type": "huggingface"}
        return DatasetParam.from_dict(content, "flags")
    return data.model_copy(
        update={
            "basic_parameters": data.basic_parameters.model_copy(update=basic),
            "preprocess_parameters": data.preprocess_parameters.model_copy(update=preprocess),
        }
    )


def _settings(flags: AnswerFlags, config: AnswerConfig, shared: Mapping[str, Any]) -> GenerationSettings:
    values = {**config.keys.generation_config.settings(), **config.inference.generation.settings()}
    names = (
        "max_new_tokens",
        "do_sample",
        "temperature",
        "top_p",
        "top_k",
        "repetition_penalty",
        "num_beams",
        "use_cache",
    )
    values |= {name: value for name in names if (value := getattr(flags, name)) is not None}
    stop = tuple(flags.stop or values.pop("stop_strings", None) or ())
    values.pop("stop_strings", None)
    least, most = values.get("min_new_tokens"), values.get("max_new_tokens")
    if least is not None and most is not None and least > most:
        raise ConfigError(f"min_new_tokens is {least} and max_new_tokens {most}; write at most {most}")
    drawing = [name for name in ("temperature", "top_p", "top_k") if getattr(flags, name) is not None]
    if drawing and not values.get("do_sample"):
        spelt = ", ".join("--" + name.replace("_", "-") for name in drawing)
        raise ConfigError(f"{spelt}: the most likely token is taken each time; add --do-sample to draw tokens")
    seed = flags.seed if flags.seed is not None else config.inference.seed
    batch_size = flags.batch_size or shared.get("micro_batch_size")
    return GenerationSettings(values, stop, _SEED if seed is None else seed, batch_size)


def _sharding(shared: Mapping[str, Any]) -> Fsdp2Config | None:
    """How parameters are sharded; None: they aren't."""
    parts = (shared.get("tensor_model_parallel_size") or 1) * (shared.get("pipeline_model_parallel_size") or 1)
    path = shared.get("fsdp2_config_path")
    if not shared.get("use_torch_fsdp2"):
        if path:
            notice("--fsdp2-config-path has no effect: it describes --use-torch-fsdp2, which is not given")
        if parts == 1:
            return None
        notice(
            f"--tensor-model-parallel-size × --pipeline-model-parallel-size is {parts}: the parameters are sharded "
            f"over {parts} processes with FSDP2 instead, each of which runs all layers"
        )
        return Fsdp2Config(sharding_size=parts)
    if parts > 1:
        raise ConfigError(
            f"--use-torch-fsdp2 and tensor- or pipeline-parallel sizes ({parts} in all) are both given; leave the "
            "sizes out, the parameters are sharded as fsdp2.yaml says"
        )
    return load_fsdp2_config(path) if path else Fsdp2Config(sharding_size="auto")


def _trusts(config: AnswerConfig, param: DatasetParam) -> bool:
    of_model = config.model is not None and config.model.trust_remote_code
    return of_model or param.preprocess_parameters.trust_remote_code
