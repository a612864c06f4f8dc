"""`dataset_info.json`: data sets by name; and the same description written into data.json in place of a name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator, Field

from mindspeed_mm.configs.data_config import DatasetAttr, read_row_limit
from mindspeed_mm.configs.scalars import show
from mindspeed_mm.configs.sections import Bool, Float, Section, build_section, one_of
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.log import notice

_HUB_KEYS = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
_WITHOUT_EFFECT = ("file_sha1", "split", "subset", "folder", "load_from")
#: columns of alpaca rows where an entry names none
_ALPACA_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output"}


class ColumnNames(Section):
    """Names of columns; an absent one is the format's own."""

    prompt: str | None = Field(None, description="alpaca: the instruction; the text of a row of plain text")
    query: str | None = Field(None, description="alpaca: the rest of the user's turn")
    response: str | None = Field(None, description="the answer")
    history: str | None = Field(None, description="alpaca: earlier turns")
    system: str | None = Field(None, description="the system text")
    messages: str | None = Field(None, description="sharegpt, openai: the list of turns")
    tools: str | None = Field(None, description="the tools")
    images: str | None = Field(None, description="image paths")
    videos: str | None = Field(None, description="video paths")
    audios: str | None = Field(None, description="audio paths")
    chosen: str | None = Field(None, description="the preferred answer")
    rejected: str | None = Field(None, description="the other answer")


class Tags(Section):
    """Names inside a turn; an absent one is the format's own."""

    role_tag: str | None = Field(None, description="key of a turn's role")
    content_tag: str | None = Field(None, description="key of a turn's content")
    user_tag: str | None = Field(None, description="role of the user")
    assistant_tag: str | None = Field(None, description="role of the assistant")
    observation_tag: str | None = Field(None, description="role of a tool's result")
    function_tag: str | None = Field(None, description="role of a tool call")
    system_tag: str | None = Field(None, description="role of the system")


def _read_file_names(value: object) -> object:
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not value or not all(isinstance(part, str) and part.strip() for part in value):
        raise ValueError("expected a path, or a list of paths")
    return [part.strip() for part in value]


class RegistryEntry(Section):
    """One data set."""

    file_name: Annotated[list[str], BeforeValidator(_read_file_names)] | None = Field(
        None, description="data file, folder of data files, pattern such as part-*.jsonl, or a list of them"
    )
    formatting: Annotated[str, one_of(("alpaca", "sharegpt", "openai", "multimodal_tool"))] = Field(
        "alpaca", description="shape of a row"
    )
    columns: ColumnNames = Field(ColumnNames(), description="names of columns")
    tags: Tags = Field(Tags(), description="names inside a turn")
    num_samples: Annotated[int | None, BeforeValidator(read_row_limit)] = Field(
        None, description="upper bound on rows; null or -1 = all"
    )
    repeat_time: Annotated[Float, Field(gt=0)] = Field(
        1.0, description="how often the rows are used; below 1: the share of them that is"
    )
    ranking: Bool = Field(False, description="rows are preference pairs")
    pretrain: Bool = Field(False, description="rows are plain text, in the prompt column")
    media_dir: str | None = Field(None, description="folder that relative media paths are joined to")
    tag_may_be_missing: Bool = Field(
        False, description="a single medium without a tag stands before the first turn of the user"
    )
    hf_hub_url: str | None = Field(None, description="name on a hub: refused without file_name")
    ms_hub_url: str | None = Field(None, description="name on a hub: refused without file_name")
    om_hub_url: str | None = Field(None, description="name on a hub: refused without file_name")
    script_url: str | None = Field(None, description="loading script: refused without file_name")
    cloud_file_name: str | None = Field(None, description="place in a cloud: refused without file_name")

    def attr(self) -> tuple[DatasetAttr, tuple[str, ...]]:
        """Return the names of columns and roles, and the keys of those that rows may lack."""
        given = {**self.columns.model_dump(exclude_none=True), **self.tags.model_dump(exclude_none=True)}
        optional: tuple[str, ...] = ()
        if self.formatting == "alpaca" and not given.keys() & _ALPACA_COLUMNS.keys() and not self.pretrain:
            given.update(_ALPACA_COLUMNS)
            optional = ("query",)
        switches = {"formatting": self.formatting, "ranking": self.ranking, "pretrain": self.pretrain}
        return DatasetAttr(**switches, **given), optional


def read_entry(value: object, name: str, file: str) -> RegistryEntry:
    """Type one entry.

    Args:
        value: What the file holds.
        name: Its name, for messages.
        file: The file's name, for messages.

    Raises:
        ConfigError: unknown keys with the nearest name, wrong values, or no local file.
    """
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{file}: '{name}' is {show(value)}; expected an object with file_name, formatting, columns …"
        )
    entry, keys = build_section(RegistryEntry, value, f"{file}: data set '{name}'", file, _WITHOUT_EFFECT)
    if keys.published:
        notice(f"{file}: data set '{name}': no effect here: {', '.join(keys.published)}: the file is read as it is")
    if entry.file_name is None:
        hub = [f"'{key}' {show(getattr(entry, key))}" for key in _HUB_KEYS if getattr(entry, key) is not None]
        found = f"found {' and '.join(hub)}; nothing is fetched while training: download it and " if hub else ""
        raise ConfigError(f"{file}: data set '{name}' has no 'file_name'; {found}write the local file as 'file_name'")
    return entry
