"""The typed sections of data.json, built from typed or raw sections alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from mindspeed_mm.configs.config import ConfigReader
from mindspeed_mm.configs.data_config import DataConfig, DataloaderParam, DatasetParam
from mindspeed_mm.configs.published import published_paths
from mindspeed_mm.configs.sections import Section, build_section, plain
from mindspeed_mm.utils.errors import ConfigError

#: a section as an entry script reads it from a file
RawSection: TypeAlias = ConfigReader | Mapping[str, object]


class _LoaderSection(Section):
    dataloader_param: DataloaderParam = DataloaderParam()


def dataset_param_of(param: DatasetParam | RawSection) -> DatasetParam:
    """Return `dataset_param` typed: returned as it is if it is typed, else checked like the whole file.

    Args:
        param: DatasetParam, ConfigReader or dict.

    Raises:
        ConfigError: unknown keys (with the nearest name), wrong values, things that are not there yet.
    """
    if not isinstance(param, DatasetParam):
        file = getattr(param, "config_file", None)
        param = DataConfig.from_dict({"dataset_param": plain(param)}, file=file).dataset_param
    basic = param.basic_parameters
    if basic.train_on_prompt and basic.mask_history:
        raise ConfigError(
            "dataset_param.basic_parameters: train_on_prompt and mask_history exclude each other; set one to false"
        )
    if basic.tool_format is not None:
        raise ConfigError(
            f"dataset_param.basic_parameters.tool_format: found {basic.tool_format!r}; tool calls are written "
            "as the chat template writes them, expected null"
        )
    return param


def dataloader_param_of(param: DataloaderParam | RawSection | None) -> DataloaderParam:
    """Return `dataloader_param` typed (see `dataset_param_of`); None means all defaults."""
    if param is None:
        return DataloaderParam()
    if isinstance(param, DataloaderParam):
        return param
    file = getattr(param, "config_file", None)
    mapping = {"dataloader_param": plain(param)}
    section, _ = build_section(_LoaderSection, mapping, file, "data.json", published_paths("data"), "data")
    return section.dataloader_param
