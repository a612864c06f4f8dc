"""`--load` as the source of a model's configuration, where model.json names no directory that has one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindspeed_mm.configs.flags.parsed import ParsedFlags, backend_of
from mindspeed_mm.configs.reader import ConfigReader, MMConfig
from mindspeed_mm.utils.files import read_object
from mindspeed_mm.utils.log import notice

_TRACKER, _METADATA, _STATE = "latest_checkpointed_iteration.txt", ".metadata", "state.json"
_TOKENIZER = "model_name_or_path"


def settle_language_source(args: ParsedFlags, mm: MMConfig) -> None:
    """Set `init_from_hf_path` by `--load`, where model.json doesn't give it.

    A HF directory is taken itself, and is the tokenizer's too where data.json names none. Beside a checkpoint it is
    the directory that its run was started from, else (with FSDP2) that of data.json's tokenizer; the weights are the
    checkpoint's.

    Args:
        args: the flags.
        mm: model.json and data.json; `model.init_from_hf_path` and the data's `model_name_or_path` are set.
    """
    model: ConfigReader | None = getattr(mm, "model", None)
    load = getattr(args, "load", None)
    if model is None or model.get("init_from_hf_path") or not load or not Path(load).is_dir():
        return
    file, path = model.config_file or "model.json", Path(load)
    if not _is_checkpoint(path):
        if "model_type" in _config_of(path):
            model["init_from_hf_path"] = load
            notice(f"{file}: 'init_from_hf_path' is missing; --load '{load}' gives the model's configuration, too")
            _settle_tokenizer(mm, load)
        return
    if backend_of(args) == "ptd" and model.get("text_decoder"):
        return  # its numbers describe the model
    remembered, preprocess = _remembered(path), _preprocess(mm)
    tokenizer = preprocess.get(_TOKENIZER) if preprocess is not None else None
    if remembered and "model_type" in _config_of(Path(remembered)):
        model["init_from_hf_path"] = remembered
        why = "the run of --load was started from it"
    elif isinstance(tokenizer, str) and "model_type" in _config_of(Path(tokenizer)):
        model["init_from_hf_path"] = tokenizer
        why = f"it is data.json's {_TOKENIZER}"
    else:
        return
    notice(
        f"{file}: 'init_from_hf_path' is missing; the model's configuration is that of "
        f"'{model['init_from_hf_path']}', as {why}, and its weights are those of --load '{load}'"
    )


def settle_generation_source(args: ParsedFlags, mm: MMConfig) -> None:
    """Set the diffusers directory by `--load`, where model.json gives neither one nor a structure.

    Args:
        args: the flags.
        mm: model.json; `init_from_diffusers` is set to a whole pipeline, `predictor.from_pretrained` to a transformer.
    """
    model: ConfigReader | None = getattr(mm, "model", None)
    load = getattr(args, "load", None)
    if model is None or model.get("init_from_diffusers") or not load or _is_checkpoint(Path(load)):
        return
    predictor: object = model.get("predictor")
    described = predictor.to_dict() if isinstance(predictor, ConfigReader) else {}
    if described.keys() - {"model_id", "dtype", "train_from_scratch"}:
        return  # a directory or a structure is described
    path = Path(load)
    if (path / "model_index.json").is_file():
        key = "init_from_diffusers"
        model[key] = load
    elif "_class_name" in _config_of(path):
        key = "predictor.from_pretrained"
        model["predictor"] = {**described, "from_pretrained": load}
    else:
        return
    notice(f"{model.config_file or 'model.json'}: '{key}' is missing; --load '{load}' gives the configuration, too")


def _is_checkpoint(path: Path) -> bool:
    return any((path / name).is_file() for name in (_TRACKER, _METADATA)) or any(path.glob(f"iter_*/{_METADATA}"))


def _config_of(path: Path) -> Mapping[str, Any]:
    """Return the content of a directory's config.json; {} where it has none that can be read."""
    return read_object(path / "config.json")


def _remembered(path: Path) -> str | None:
    """Return the HF directory that a checkpoint's run was started from."""
    states = [path / _STATE, *sorted(path.glob(f"iter_*/{_STATE}"), reverse=True)]
    return next((str(source) for state in states if (source := read_object(state).get("source"))), None)


def _preprocess(mm: MMConfig) -> ConfigReader | None:
    section: object = getattr(mm, "data", None)
    for key in ("dataset_param", "preprocess_parameters"):
        section = section.get(key) if isinstance(section, ConfigReader) else None
    return section if isinstance(section, ConfigReader) else None


def _settle_tokenizer(mm: MMConfig, load: str) -> None:
    data: ConfigReader | None = getattr(mm, "data", None)
    param: object = data.get("dataset_param") if data is not None else None
    if not isinstance(param, ConfigReader) or param.get("tokenizer_config"):
        return
    preprocess = _preprocess(mm)
    if preprocess is None and param.get("preprocess_parameters") is None:
        param["preprocess_parameters"] = {_TOKENIZER: load}
    elif preprocess is not None and not preprocess.get(_TOKENIZER):
        preprocess[_TOKENIZER] = load
