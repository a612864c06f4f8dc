"""Find the data sets that `dataset` in data.json names: files, folders, patterns, registered names, descriptions."""

from __future__ import annotations

import functools
import glob
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_mm.configs.data_config import DatasetAttr
from mindspeed_mm.configs.files import read_json
from mindspeed_mm.configs.registry_config import RegistryEntry, read_entry
from mindspeed_mm.data.sources.files import DataEntry
from mindspeed_mm.data.sources.row_files import refuse_tokens
from mindspeed_mm.utils.errors import ConfigError, DataError, did_you_mean

REGISTRY = "dataset_info.json"
_DATA_SUFFIXES = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow")
_NOT_DATA = (REGISTRY, "dataset_dict.json", "state.json")


def find_data_sets(
    names: Sequence[str | Mapping[str, Any]],
    dataset_dir: str,
    attr: DatasetAttr,
    max_samples: int | None = None,
    *,
    is_text: bool = False,
) -> list[DataEntry]:
    """Return the data sets that `dataset` names.

    A name is a file, a folder or a pattern, in `dataset_dir` or as written; else a key of `dataset_info.json` in
    `dataset_dir`. An object is an entry like those of that file.

    Args:
        names: The names in data.json, in order.
        dataset_dir: Folder of files, registry and media.
        attr: Names of columns and roles of files that are named themselves; entries have their own.
        max_samples: Upper bound on the rows of each data set.
        is_text: Rows are plain text: folders give their .txt files, too.

    Raises:
        DataError: Neither a file nor a registered name; the message has the nearest of both.
        ConfigError: An entry has something that can't be honoured.
    """
    found = []
    for number, name in enumerate(names):
        if isinstance(name, Mapping):
            label = str(name.get("file_name") or f"dataset[{number}]")
            entry = read_entry(name, label, "dataset_param.basic_parameters.dataset")
            found.append(_from_entry(entry, label, dataset_dir, max_samples, is_text))
        elif paths := find_files(name, dataset_dir, is_text):
            found.append(DataEntry(name, paths, attr, dataset_dir, max_samples))
        else:
            found.append(_registered(name, dataset_dir, max_samples, names, is_text))
    return found


def _registered(
    name: str, dataset_dir: str, max_samples: int | None, names: Sequence[str | Mapping[str, Any]], is_text: bool
) -> DataEntry:
    file = os.path.join(dataset_dir, REGISTRY)
    registry = read_registry(file) if os.path.isfile(file) else {}
    if name not in registry:
        used = [Path(other).name for other in names if isinstance(other, str)]
        raise DataError(_not_found(name, dataset_dir, registry, used))
    return _from_entry(read_entry(registry[name], name, file), name, dataset_dir, max_samples, is_text)


@functools.lru_cache(maxsize=4)
def _read_registry(file: str, _modified: int) -> Mapping[str, Any]:
    registry = read_json(file)
    if not isinstance(registry, Mapping):
        raise ConfigError(f"{file}: expected an object of data sets by name, found {type(registry).__name__}")
    return registry


def read_registry(file: str) -> Mapping[str, Any]:
    """Return the entries of a registry by name, untyped: those that aren't used may have any content."""
    return _read_registry(file, os.stat(file).st_mtime_ns)


def _from_entry(entry: RegistryEntry, name: str, dataset_dir: str, max_samples: int | None, is_text: bool) -> DataEntry:
    attr, optional = entry.attr()
    paths: tuple[str, ...] = ()
    for file in entry.file_name or ():
        found = find_files(file, dataset_dir, is_text)
        if not found:
            raise DataError(f"data set '{name}': {_not_found(file, dataset_dir, {})}")
        paths += found
    media_dir = dataset_dir
    if entry.media_dir is not None:
        joined = os.path.join(dataset_dir, entry.media_dir)
        media_dir = joined if os.path.isdir(joined) else entry.media_dir
    limits = [limit for limit in (entry.num_samples, max_samples) if limit is not None]
    return DataEntry(
        name,
        paths,
        attr,
        media_dir,
        min(limits, default=None),
        entry.repeat_time,
        optional,
        entry.tag_may_be_missing,
    )


def find_files(name: str, folder: str, is_text: bool = False) -> tuple[str, ...]:
    """Return the files that a name stands for, in `folder` or as written; empty if there are none.

    A folder gives its data files in the order of their names, without hidden ones; a pattern its matches.

    Raises:
        DataError: A folder without data files, or the prefix of a file of tokens.
    """
    for candidate in dict.fromkeys((os.path.join(folder, name), name)):
        if os.path.isfile(candidate):
            return (candidate,)
        if os.path.isdir(candidate):
            return _files_of_folder(candidate, (*_DATA_SUFFIXES, ".txt") if is_text else _DATA_SUFFIXES)
        if any(sign in name for sign in "*?["):
            matches = sorted(path for path in glob.glob(candidate) if os.path.isfile(path))
            if matches:
                return tuple(matches)
        refuse_tokens(candidate)
    return ()


def _files_of_folder(folder: str, suffixes: tuple[str, ...]) -> tuple[str, ...]:
    names = sorted(
        entry.name
        for entry in os.scandir(folder)
        if entry.is_file() and not entry.name.startswith(".") and entry.name not in _NOT_DATA
    )
    files = [name for name in names if name.lower().endswith(suffixes)]
    if not files:
        held = names or sorted(f"{entry.name}/" for entry in os.scandir(folder))
        seen = f"found {', '.join(held[:8])}" if held else "it is empty"
        raise DataError(f"{folder}: a folder without data files ({', '.join(suffixes)}); {seen}")
    return tuple(os.path.join(folder, name) for name in files)


def _not_found(name: str, folder: str, registry: Mapping[str, Any], used: Sequence[str] = ()) -> str:
    joined = os.path.join(folder, name)
    near = ""
    for candidate in (joined, name):
        parent = Path(candidate).parent
        if parent.is_dir():
            names = [*(entry.name for entry in parent.iterdir()), *registry]
            near = near or did_you_mean(Path(name).name, names, used=used)
    tried = joined if os.path.abspath(joined) == os.path.abspath(name) else f"{joined}, {name}"
    either = f"; {REGISTRY} there has no data set of that name either" if registry else ""
    return f"data file not found: {tried} (working folder {os.getcwd()}){either}{near}"
