"""Reading and checking model.json, data.json and tools.json of a run, with what one of them settles for another."""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_mm.configs.data_config import DataConfig, warn_of_near_data_keys
from mindspeed_mm.configs.family_structure import find_structure
from mindspeed_mm.configs.flags.parsed import ParsedFlags, backend_of
from mindspeed_mm.configs.load_source import settle_generation_source, settle_language_source
from mindspeed_mm.configs.model_config import TransformersModelConfig, check_local_path, warn_of_near_model_keys
from mindspeed_mm.configs.other_scripts import FileKind, owner_problem
from mindspeed_mm.configs.reader import ConfigReader, MMConfig, freeze_reader, read_config_file
from mindspeed_mm.configs.scalars import read_bool, read_int, show
from mindspeed_mm.configs.sections import raise_all
from mindspeed_mm.configs.tools_config import ToolsConfig
from mindspeed_mm.configs.vlm_config import VLMModelConfig, check_pipeline_layers
from mindspeed_mm.utils.errors import ConfigError

if TYPE_CHECKING:
    from mindspeed_mm.configs.generation_data import GenerationDataConfig
    from mindspeed_mm.configs.sora_config import SoRAModelConfig


def mm_extra_args_provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--mm-data`, `--mm-model` and `--mm-tool` to a parser that lacks them (ours has them already)."""
    group = parser.add_argument_group("multimodal configuration files")
    for name in ("data", "model", "tool"):
        if f"--mm-{name}" not in parser._option_string_actions:
            group.add_argument(f"--mm-{name}", type=str, default=None, help=f"path of the {name} configuration")
    return parser


def merge_mm_args(args: ParsedFlags) -> None:
    """Read the files of `--mm-model`, `--mm-data` and `--mm-tool` of a language model's run into `args.mm`.

    A second call changes nothing.

    Raises:
        ConfigError: everything that is wrong in the files, together.
    """
    if not hasattr(args, "mm"):
        args.mm = read_files(args, "language", "language").files


@dataclass(frozen=True)
class TypedFiles:
    """model.json, data.json and tools.json of a run, checked.

    Attributes:
        files: as they are written.
        model, data: typed; None: keys of the script's own, or no file.
    """

    files: MMConfig
    model: TransformersModelConfig | VLMModelConfig | SoRAModelConfig | None
    data: DataConfig | GenerationDataConfig | None


def read_files(args: ParsedFlags, model_schema: FileKind | None, data_schema: FileKind | None) -> TypedFiles:
    """Read and check the files that the flags name.

    Args:
        args: the flags; `trust_remote_code` is set where a file asks for it.
        model_schema, data_schema: which schema the files of this project's own script follow; None: they belong to a
            user's own script and may hold keys of its own, of which only those close to a known one are warned of.

    Raises:
        ConfigError: everything that is wrong in the files, together.
    """
    checks: dict[str, Callable[..., Any]] = {
        "model": functools.partial(_MODEL_CHECKS[model_schema], args) if model_schema else warn_of_near_model_keys,
        "data": _DATA_CHECKS[data_schema] if data_schema else warn_of_near_data_keys,
        "tool": ToolsConfig.from_dict,
    }
    mm, problems, typed = MMConfig({}), [], {}
    for name in checks:
        path = getattr(args, f"mm_{name}", None)
        try:
            if path:
                setattr(mm, name, read_config_file(name, path))
        except ConfigError as error:
            problems.append(str(error))
    try:
        # before the checks, some of which read a model's directory
        if settle_remote_code(getattr(args, "trust_remote_code", False), mm):
            args.trust_remote_code = True
    except ConfigError as error:
        problems.append(str(error))
    if model_schema is not None:
        (settle_language_source if model_schema == "language" else settle_generation_source)(args, mm)
    if model_schema == data_schema == "generation" and hasattr(mm, "model") and hasattr(mm, "data"):
        try:
            settle_caption_length(mm.model, mm.data)
        except ConfigError as error:
            problems.append(str(error))
    for name, content in vars(mm).items():
        try:
            typed[name] = checks[name](content, file=str(content.config_file))
        except ConfigError as error:
            problems.append(str(error))
    if not problems and model_schema == data_schema == "generation" and {"model", "data"} <= typed.keys():
        problems += _generation_problems(typed["model"], typed["data"])
    if problems:
        raise ConfigError("\n".join(problems))
    for name, schema in (("model", model_schema), ("data", data_schema)):
        if schema is not None and hasattr(mm, name):
            freeze_reader(getattr(mm, name))
    return TypedFiles(mm, typed.get("model"), typed.get("data"))


def settle_remote_code(flag: bool, mm: MMConfig) -> bool:
    """Let `trust_remote_code` mean one thing in the whole run, wherever it is written.

    Args:
        flag: --trust-remote-code.
        mm: model.json and data.json; both are true afterwards if any of the three is.

    Returns:
        whether model, configuration, processor and tokenizer may run code that comes with their directories.

    Raises:
        ConfigError: one of them is true, and a file says false.
    """
    sections: list[ConfigReader] = []
    given = {"--trust-remote-code": True} if flag else {}
    for name, keys in (("model", ()), ("data", ("dataset_param", "preprocess_parameters"))):
        section: object = getattr(mm, name, None)
        for key in keys:
            section = section.get(key) if isinstance(section, ConfigReader) else None
        if not isinstance(section, ConfigReader):
            continue
        sections.append(section)
        value = section.get("trust_remote_code")
        with contextlib.suppress(ValueError):  # its own check reports what is wrong with it
            if value is not None:
                path = ".".join((*keys, "trust_remote_code"))
                given[f"{getattr(mm, name).config_file}: '{path}'"] = read_bool(value)
    if not any(given.values()):
        return False
    if not all(given.values()):
        yes = " and ".join(where for where, value in given.items() if value)
        no = " and ".join(where for where, value in given.items() if not value)
        raise ConfigError(
            f"{no} is false, and {yes} true; code that comes with a model's directory is run for the whole run or not "
            "at all: make them agree, or keep one of them"
        )
    for section in sections:
        section.trust_remote_code = True
    return True


def settle_caption_length(
    model: ConfigReader | MutableMapping[str, Any], data: ConfigReader | Mapping[str, Any]
) -> None:
    """Let `model_max_length` of data.json's (first) tokenizer be the longest caption of the first text encoder.

    Args:
        model, data: content of model.json and data.json of a generation model; `text_encoder.max_length` of the first
            is set where the second names a length and the captions are still to be encoded.

    Raises:
        ConfigError: both name a length, and not the same one.
    """
    param = data.get("dataset_param")
    if not isinstance(param, (Mapping, ConfigReader)):
        return
    found = param.get("tokenizer_config")
    first = (found[0] if found else None) if isinstance(found, list) else found
    if not isinstance(first, (Mapping, ConfigReader)) or first.get("model_max_length") is None:
        return
    if model.get("load_text_features") or param.get("dataset_type") == "feature":
        return
    key = "dataset_param.tokenizer_config.model_max_length"
    try:
        length = read_int(first.get("model_max_length"))
    except ValueError as error:
        file = getattr(data, "config_file", None) or "data.json"
        raise ConfigError(f"{file}: '{key}' is {show(first.get('model_max_length'))}; {error}") from None
    encoders = model.get("text_encoder")
    encoder = (encoders[0] if encoders else None) if isinstance(encoders, list) else encoders
    if encoder is None:
        model["text_encoder"] = [{"max_length": length}]
        return
    if not isinstance(encoder, (MutableMapping, ConfigReader)):  # its own check reports what is wrong with it
        return
    if encoder.get("max_length") not in (None, length):
        raise ConfigError(
            f"the longest caption is {show(encoder.get('max_length'))} tokens by model.json's text_encoder.max_length "
            f"and {length} by data.json's {key}; make them agree, or keep one of them"
        )
    encoder["max_length"] = length


def _check_model(args: ParsedFlags, content: ConfigReader, file: str) -> TransformersModelConfig | VLMModelConfig:
    elsewhere = owner_problem(content.to_dict(), file)
    raise_all([elsewhere] if elsewhere else [])
    if backend_of(args) == "ptd":
        of_megatron = VLMModelConfig.from_dict(content, file=file)
        _check_megatron_model(args, of_megatron)
        return of_megatron
    config = TransformersModelConfig.from_dict(content, file=file)
    raise_all(check_local_path(file, "init_from_hf_path", config.init_from_hf_path))
    return config


def _check_megatron_model(args: ParsedFlags, config: VLMModelConfig) -> None:
    raise_all(check_local_path(config.file, "init_from_hf_path", config.init_from_hf_path))
    if not (config.init_from_hf_path or config.train_from_scratch or _is_there(args.load)):
        raise ConfigError(
            f"{config.file}: there are no weights to start from: give 'init_from_hf_path' (a HF directory), --load (a "
            'checkpoint that is there), or "train_from_scratch": true for random ones'
        )
    hf_config = config.hf_config()
    virtual = args.virtual_pipeline_model_parallel_size
    raise_all(
        check_pipeline_layers(
            config,
            args.pipeline_model_parallel_size,
            None if virtual == 1 else virtual,
            find_structure(hf_config.model_type).count_tower_layers(hf_config),
            hf_config.get_text_config().num_hidden_layers,
        )
    )


def _is_there(path: str | None) -> bool:
    return bool(path) and Path(str(path)).is_dir()


def _check_data(content: ConfigReader, file: str) -> DataConfig:
    config = DataConfig.from_dict(content, file=file)
    key = "dataset_param.preprocess_parameters.model_name_or_path"
    raise_all(check_local_path(file, key, config.dataset_param.preprocess_parameters.model_name_or_path))
    return config


# The schemas of generation are imported where they are used: runs of language models start without them.


def _generation_problems(model: SoRAModelConfig, data: GenerationDataConfig) -> list[str]:
    """Return a sentence for each contradiction between two files that are each valid."""
    from mindspeed_mm.configs.sora_checks import check_generation_files

    return check_generation_files(model, data)


def _check_generation_model(args: ParsedFlags, content: ConfigReader, file: str) -> SoRAModelConfig:
    from mindspeed_mm.configs.sora_checks import check_generation_model
    from mindspeed_mm.configs.sora_config import SoRAModelConfig

    elsewhere = owner_problem(content.to_dict(), file, "generation")
    raise_all([elsewhere] if elsewhere else [])
    config = SoRAModelConfig.from_dict(content, file=file)
    raise_all(check_generation_model(config, has_checkpoint=_is_there(args.load)))
    return config


def _check_generation_data(content: ConfigReader, file: str) -> GenerationDataConfig:
    from mindspeed_mm.configs.generation_data import GenerationDataConfig

    return GenerationDataConfig.from_dict(content, file=file)


_MODEL_CHECKS: dict[FileKind, Callable[..., Any]] = {"language": _check_model, "generation": _check_generation_model}
_DATA_CHECKS: dict[FileKind, Callable[..., Any]] = {"language": _check_data, "generation": _check_generation_data}
