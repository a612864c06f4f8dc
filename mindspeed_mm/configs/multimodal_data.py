"""`dataset_type: multimodal` in the words of `dataset_type: huggingface`: InternVL-style lists of jsonl files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mindspeed_mm.configs.scalars import read_bool, read_int, show
from mindspeed_mm.utils.errors import ConfigError, did_you_mean
from mindspeed_mm.utils.log import notice

#: published dataset types of one family, whose rows have the form of dataset_type huggingface
_SAME_ROWS = ("qwen3_asr",)
_KEYS = ("data_path", "data_folder", "repeat_time", "max_samples")
#: columns and roles of InternVL's rows: {image, video, conversations: [{from, value}]}
_COLUMNS = {"messages": "conversations", "images": "image", "videos": "video", "audios": "audio"}
_TAGS = {"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt"}


#: InternVL's keys of how an image is cut into tiles: what they are called beside the processor, how they are read
TILE_KEYS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "dynamic_image_size": ("crop_to_patches", read_bool),
    "min_dynamic_patch": ("min_patches", read_int),
    "max_dynamic_patch": ("max_patches", read_int),
    "image_size": ("tile_size", read_int),
}


def translated_dataset_param(param: object, file: str) -> object:
    """Return `dataset_param` in the words of `dataset_type: huggingface`.

    InternVL's keys of how an image is cut into tiles become keys of `preprocess_parameters`; multimodal
    `basic_parameters` become entries of `dataset`.

    Args:
        param: Plain mapping.
        file: The file's name, for messages.

    Raises:
        ConfigError: A key with a value of a wrong type, or other than that of its second name; an
            entry without data_path, or with an unknown key.
    """
    if isinstance(param, Mapping) and param.get("dataset_type") in _SAME_ROWS:
        notice(f"{file}: 'dataset_param.dataset_type' {param['dataset_type']}: rows are read as those of huggingface")
        param = {**param, "dataset_type": "huggingface"}
    return _with_entries(_with_tiles(param, file), file)


def _with_tiles(param: object, file: str) -> object:
    if not isinstance(param, Mapping) or not any(param.get(key) is not None for key in TILE_KEYS):
        return param
    preprocess = dict(param.get("preprocess_parameters") or {})
    for key, (name, read) in TILE_KEYS.items():
        if param.get(key) is None:
            continue
        try:
            value = read(param[key])
        except ValueError as error:
            raise ConfigError(f"{file}: 'dataset_param.{key}' is {show(param[key])}; {error}") from None
        if preprocess.get(name) not in (None, value):
            raise ConfigError(
                f"{file}: 'dataset_param.{key}' is {show(value)} and 'preprocess_parameters.{name}' "
                f"{show(preprocess[name])}; they are the same, keep one"
            )
        preprocess[name] = value
    rest = {key: value for key, value in param.items() if key not in TILE_KEYS}
    return {**rest, "preprocess_parameters": preprocess}


def _with_entries(param: object, file: str) -> object:
    """`dataset_param` with multimodal `basic_parameters` written as entries of `dataset`; others as they are.

    Each {data_path, data_folder, repeat_time} becomes an entry with the names of InternVL's columns, or with those
    of `attr` where it gives some. The processor is that of `preprocess_parameters.model_name_or_path`, else of
    `tokenizer_config.from_pretrained`.
    """
    if not isinstance(param, Mapping) or param.get("dataset_type") != "multimodal":
        return param
    basic = param.get("basic_parameters")
    parts = list(basic) if isinstance(basic, list) else [basic]
    rest: dict[str, Any] = {}
    if isinstance(basic, Mapping):
        if "data_path" not in basic and "dataset" in basic:  # already in the other words
            return param
        rest = {key: value for key, value in basic.items() if key not in _KEYS}
        parts = [{key: value for key, value in basic.items() if key in _KEYS}]
    attr = param.get("attr") or {}
    entries = [_entry(part, f"{_path(basic, number)}", attr, file) for number, part in enumerate(parts)]
    preprocess = dict(param.get("preprocess_parameters") or {})
    tokenizer = dict(param.get("tokenizer_config") or {})
    if "model_name_or_path" not in preprocess and tokenizer.get("from_pretrained"):
        preprocess["model_name_or_path"] = tokenizer.pop("from_pretrained")
    basic_parameters = {**rest, "dataset": entries}
    changed = {"basic_parameters": basic_parameters, "preprocess_parameters": preprocess, "tokenizer_config": tokenizer}
    return {**param, **changed}


def _path(basic: object, number: int) -> str:
    return "dataset_param.basic_parameters" + (f"[{number}]" if isinstance(basic, list) else "")


def _entry(part: object, path: str, attr: Mapping[str, Any], file: str) -> dict[str, Any]:
    if not isinstance(part, Mapping) or not part.get("data_path"):
        raise ConfigError(f"{file}: '{path}' is {show(part)}; expected an object with {', '.join(_KEYS)}")
    for key, value in part.items():
        if key not in _KEYS:
            raise ConfigError(f"{file}: unknown key '{path}.{key}' (value {show(value)}){did_you_mean(key, _KEYS)}")
    columns = {key: attr.get(key, name) for key, name in _COLUMNS.items()}
    columns.update({key: attr[key] for key in ("system", "tools") if attr.get(key)})
    entry: dict[str, Any] = {
        "file_name": part["data_path"],
        "formatting": "sharegpt",
        "columns": columns,
        "tags": {key: attr.get(key, name) for key, name in _TAGS.items()},
        "tag_may_be_missing": True,
    }
    for key, name in (("data_folder", "media_dir"), ("repeat_time", "repeat_time"), ("max_samples", "num_samples")):
        if part.get(key) is not None:
            entry[name] = part[key]
    return entry
