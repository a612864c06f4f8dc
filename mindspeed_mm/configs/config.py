"""model.json, data.json and tools.json as attribute-style objects: `args.mm.model`, `args.mm.data`, `args.mm.tool`."""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_mm.configs.data_config import DataConfig, warn_of_near_data_keys
from mindspeed_mm.configs.files import JSON_SUFFIXES, YAML_SUFFIXES, FileSection, read_json, read_yaml
from mindspeed_mm.configs.flags.spec import backend_of
from mindspeed_mm.configs.load_source import settle_generation_source, settle_language_source
from mindspeed_mm.configs.model_config import TransformersModelConfig, check_local_path, warn_of_near_model_keys
from mindspeed_mm.configs.other_scripts import FileKind, owner_problem
from mindspeed_mm.configs.scalars import read_bool, read_int, show
from mindspeed_mm.configs.sections import raise_all
from mindspeed_mm.configs.tools_config import ToolsConfig
from mindspeed_mm.configs.vlm_config import VLMModelConfig, check_pipeline_layers
from mindspeed_mm.utils.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from mindspeed_mm.configs.generation_data import GenerationDataConfig
    from mindspeed_mm.configs.sora_config import SoRAModelConfig


class ConfigReader:
    """A mapping whose keys are attributes too, at every depth (in lists as well).

    Values stay what the file held: `to_dict()` gives back exactly the mapping it was made of. Attributes may be set;
    a mapping that is set becomes a ConfigReader like the others.

    Args:
        config: the mapping; None means an empty one.
        file: the file it came from, for messages.
        path: the dotted path of this part inside the file, for messages.
    """

    __slots__ = ("__weakref__", "_data", "_file", "_path")

    def __init__(self, config: Mapping[str, Any] | None = None, *, file: str | None = None, path: str = "") -> None:
        object.__setattr__(self, "_file", file)
        object.__setattr__(self, "_path", path)
        object.__setattr__(self, "_data", {})
        if isinstance(config, ConfigReader):
            config = config.to_dict()
        if config is not None and not isinstance(config, Mapping):
            raise ConfigError(f"{self._where()}: found {show(config)}, expected an object")
        for key, value in (config or {}).items():
            self._data[key] = self._wrap(key, value)

    def _wrap(self, key: str, value: object) -> Any:
        path = f"{self._path}.{key}" if self._path else str(key)
        if isinstance(value, Mapping):
            return ConfigReader(value, file=self._file, path=path)
        if isinstance(value, list):
            return [self._wrap(f"{key}[{index}]", item) for index, item in enumerate(value)]
        return value

    def _where(self) -> str:
        return ": ".join(part for part in (self._file or "configuration", self._path) if part)

    @property
    def config_file(self) -> str | None:
        """The file this came from, or None."""
        return self._file

    def __getattr__(self, name: str) -> Any:
        # Private and dunder names are never keys: copy, pickle and inspect probe for them on half-made objects.
        if name.startswith("_"):
            raise AttributeError(name)
        data = self._data
        if name in data:
            return data[name]
        path = f"{self._path}.{name}" if self._path else name
        near = did_you_mean(name, map(str, data))
        raise AttributeError(f"{self._file or 'configuration'}: no key '{path}'{near}")

    def __setattr__(self, name: str, value: object) -> None:
        self._data[name] = self._wrap(name, value)

    def __delattr__(self, name: str) -> None:
        if name not in self._data:
            raise AttributeError(name)
        del self._data[name]

    def __getitem__(self, key: str) -> Any:
        if key not in self._data:
            raise KeyError(key)
        return self._data[key]

    def __setitem__(self, key: str, value: object) -> None:
        self._data[key] = self._wrap(key, value)

    def __contains__(self, key: object) -> bool:
        return key in self._data

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ConfigReader):
            return self._data == other._data
        if isinstance(other, Mapping):
            return self.to_dict() == dict(other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]  # mutable, like dict

    def __repr__(self) -> str:
        place = f" from {self._where()}" if self._file else ""
        return f"<ConfigReader{place}: {self.to_dict()!r}>"

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *map(str, self._data)]

    def __getstate__(self) -> dict[str, Any]:
        return {"data": self.to_dict(), "file": self._file, "path": self._path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        ConfigReader.__init__(self, state["data"], file=state["file"], path=state["path"])

    def keys(self) -> KeysView[str]:
        """The keys at this level."""
        return self._data.keys()

    def values(self) -> ValuesView[Any]:
        """The values at this level; nested mappings are ConfigReaders."""
        return self._data.values()

    def items(self) -> ItemsView[str, Any]:
        """The (key, value) pairs at this level."""
        return self._data.items()

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of `key`, or `default` if there is none."""
        return self._data.get(key, default)

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts and lists, equal to what the file held."""
        return {key: _unwrap(value) for key, value in self._data.items()}

    def update_unuse(self, **kwargs: Any) -> dict[str, Any]:
        """Set those of `kwargs` whose key exists already; return the others."""
        unused = {}
        for key, value in kwargs.items():
            if key in self._data:
                self[key] = value
            else:
                unused[key] = value
        return unused


def _unwrap(value: object) -> Any:
    if isinstance(value, ConfigReader):
        return value.to_dict()
    if isinstance(value, list):
        return [_unwrap(item) for item in value]
    return value


class MMConfig:
    """The configuration files of a run, each as an attribute.

    A `.json` file is taken whole; a `.yaml` file is indexed by the name, so that one file may hold `model:`, `data:`
    and `tool:`. A name without a path (None or "") gets no attribute.

    Args:
        files: name → path, e.g. `{"model": "model.json", "data": "data.json", "tool": "tools.json"}`.

    Attributes:
        model, data, tool: the files of these names, where they were given.

    Raises:
        ConfigError: the faults of all files together.
    """

    model: ConfigReader
    data: ConfigReader
    tool: ConfigReader

    def __init__(self, files: Mapping[str, str | Path | None]) -> None:
        problems = []
        for name, path in files.items():
            if not path:
                continue
            try:
                setattr(self, name, _read_config(name, path))
            except ConfigError as error:
                problems.append(str(error))
        if problems:
            raise ConfigError("\n".join(problems))

    def __repr__(self) -> str:
        return f"MMConfig({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


def _read_config(name: str, path: str | Path) -> ConfigReader:
    if isinstance(path, FileSection):
        return ConfigReader(path.content, file=path.label)
    path = str(path)
    suffix = Path(path).suffix.lower()
    if suffix in JSON_SUFFIXES:
        content = read_json(path)
    elif suffix in YAML_SUFFIXES:
        whole = read_yaml(path)
        if not isinstance(whole, Mapping) or name not in whole:
            found = ", ".join(whole) if isinstance(whole, Mapping) else show(whole)
            raise ConfigError(f"{path}: no top-level key '{name}'; found {found}")
        content = whole[name]
    else:
        raise ConfigError(f"{path}: expected a name that ends in .json or .yaml")
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path}: found {show(content)}, expected an object")
    return ConfigReader(content, file=path)


def mm_extra_args_provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--mm-data`, `--mm-model` and `--mm-tool` to a parser that lacks them (ours has them already)."""
    group = parser.add_argument_group("multimodal configuration files")
    for name in ("data", "model", "tool"):
        if f"--mm-{name}" not in parser._option_string_actions:
            group.add_argument(f"--mm-{name}", type=str, default=None, help=f"path of the {name} configuration")
    return parser


def merge_mm_args(args: argparse.Namespace) -> None:
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
    model: Any
    data: Any


def read_files(args: argparse.Namespace, model_schema: FileKind | None, data_schema: FileKind | None) -> TypedFiles:
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
                setattr(mm, name, _read_config(name, path))
        except ConfigError as error:
            problems.append(str(error))
    try:
        settle_remote_code(args, mm)  # before the checks, some of which read a model's directory
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
    return TypedFiles(mm, typed.get("model"), typed.get("data"))


def settle_remote_code(args: argparse.Namespace, mm: MMConfig) -> None:
    """Let `trust_remote_code` mean one thing in the whole run, wherever it is written.

    It is true if the flag, model.json or data.json says so, for model, configuration, processor and tokenizer alike;
    `args.trust_remote_code` and both files say it afterwards.

    Raises:
        ConfigError: one of them says true, and a file says false.
    """
    sections: list[Any] = []
    said = {"--trust-remote-code": True} if getattr(args, "trust_remote_code", False) else {}
    for name, keys in (("model", ()), ("data", ("dataset_param", "preprocess_parameters"))):
        section: Any = getattr(mm, name, None)
        for key in keys:
            section = section.get(key) if isinstance(section, ConfigReader) else None
        if not isinstance(section, ConfigReader):
            continue
        sections.append(section)
        value = section.get("trust_remote_code")
        with contextlib.suppress(ValueError):  # its own check says what is wrong with it
            if value is not None:
                path = ".".join((*keys, "trust_remote_code"))
                said[f"{getattr(mm, name).config_file}: '{path}'"] = read_bool(value)
    if not any(said.values()):
        return
    if not all(said.values()):
        yes = " and ".join(where for where, value in said.items() if value)
        no = " and ".join(where for where, value in said.items() if not value)
        raise ConfigError(
            f"{no} is false, and {yes} true; code that comes with a model's directory is run for the whole run or not "
            "at all: make them agree, or keep one of them"
        )
    args.trust_remote_code = True
    for section in sections:
        section.trust_remote_code = True


def settle_caption_length(model: Any, data: Any) -> None:
    """Let `model_max_length` of data.json's (first) tokenizer be the longest caption of the first text encoder.

    Args:
        model, data: content of model.json and data.json of a generation model; `text_encoder.max_length` of the first
            is set where the second names a length and the captions are still to be encoded.

    Raises:
        ConfigError: both name a length, and not the same one.
    """
    param: Any = data.get("dataset_param")
    found: Any = param.get("tokenizer_config") if _is_object(param) else None
    first: Any = (found[0] if found else None) if isinstance(found, list) else found
    if not _is_object(first) or first.get("model_max_length") is None:
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
    encoder: Any = (encoders[0] if encoders else None) if isinstance(encoders, list) else encoders
    if encoder is None:
        model["text_encoder"] = [{"max_length": length}]
        return
    if not _is_object(encoder):  # its own check says what is wrong with it
        return
    if encoder.get("max_length") not in (None, length):
        raise ConfigError(
            f"the longest caption is {show(encoder.get('max_length'))} tokens by model.json's text_encoder.max_length "
            f"and {length} by data.json's {key}; make them agree, or keep one of them"
        )
    encoder["max_length"] = length


def _is_object(value: object) -> bool:
    return isinstance(value, (Mapping, ConfigReader))


def _check_model(
    args: argparse.Namespace, content: ConfigReader, file: str
) -> TransformersModelConfig | VLMModelConfig:
    elsewhere = owner_problem(content.to_dict(), file)
    raise_all([elsewhere] if elsewhere else [])
    if backend_of(args) == "ptd":
        of_megatron = VLMModelConfig.from_dict(content, file=file)
        _check_megatron_model(args, of_megatron)
        return of_megatron
    config = TransformersModelConfig.from_dict(content, file=file)
    raise_all(check_local_path(file, "init_from_hf_path", config.init_from_hf_path))
    return config


def _check_megatron_model(args: argparse.Namespace, config: VLMModelConfig) -> None:
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
            getattr(getattr(hf_config, "vision_config", None), "depth", None),
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
    """What in two files that are each right doesn't fit together."""
    from mindspeed_mm.configs.sora_checks import check_generation_files

    return check_generation_files(model, data)


def _check_generation_model(args: argparse.Namespace, content: ConfigReader, file: str) -> SoRAModelConfig:
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
