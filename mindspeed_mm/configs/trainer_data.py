"""`data` of the multimodal YAML file in the words of data.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_mm.configs.sections import join, raise_all
from mindspeed_mm.configs.trainer_config import TrainerData
from mindspeed_mm.configs.yaml_run import FlagValue
from mindspeed_mm.utils.log import notice

_WORKERS = 2
_CUTOFF = 1024
#: keys of val_dataset_param that may differ from those of dataset_param
_OWN = {
    "basic_parameters.dataset": "val_dataset",
    "basic_parameters.max_samples": "val_max_samples",
}
_WITHOUT_MEANING = ("basic_parameters.cache_dir", "basic_parameters.overwrite_cache")


def data_section(data: TrainerData, path: str, *, validates: bool) -> tuple[dict[str, Any], list[FlagValue]]:
    """Return the content of data.json, and the flags that the section gives.

    Args:
        data: the section.
        path: the file, for messages.
        validates: whether the run has validation.

    Raises:
        ConfigError: validation rows that are read in another way than training rows.
    """
    param, loader = dict(data.dataset_param), dict(data.dataloader_param)
    basic = param.get("basic_parameters")
    if isinstance(basic, Mapping):
        if basic.get("cutoff_len") is None:
            basic = {**basic, "cutoff_len": _CUTOFF}
            notice(f"{path}: 'data.dataset_param.basic_parameters.cutoff_len' is absent: {_CUTOFF} tokens")
        if data.val_dataset_param is not None and not validates:
            notice(f"{path}: no effect here: data.val_dataset_param: training.val_interval is 0")
        elif data.val_dataset_param is not None:
            basic = {**basic, **_validation(param, data.val_dataset_param, path)}
        param["basic_parameters"] = basic
    workers = loader.pop("num_workers", _WORKERS)
    flags = [FlagValue("data.dataloader_param.num_workers", "num_workers", _WORKERS if workers is None else workers)]
    return {"dataset_param": param, "dataloader_param": loader}, flags


def _validation(train: Mapping[str, Any], valid: Mapping[str, Any], path: str) -> dict[str, Any]:
    own, problems = {}, []
    wanted = _leaves(train)
    for key, value in _leaves(valid).items():
        if key in _OWN:
            own[_OWN[key]] = value
        elif key not in _WITHOUT_MEANING and value != wanted.get(key):
            problems.append(
                f"{path}: 'data.val_dataset_param.{key}' is {value!r} and 'data.dataset_param.{key}' "
                f"{wanted.get(key)!r}; validation rows are read as training rows are: write the same"
            )
    raise_all(problems)
    return own


def _leaves(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        key = join(prefix, str(name))
        found |= _leaves(value, key) if isinstance(value, Mapping) else {key: value}
    return found
