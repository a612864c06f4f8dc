"""Files of features: latents and text states of clips, computed once and trained on many times.

A folder contains:

| file | content |
|---|---|
| features.json | the settings that decide them: `made_from` |
| features-<rank>-<number>.safetensors | tensors of some samples, `<row>.<name>` each |
| index-<rank>.jsonl | a line for each sample: {"row", "file", "key", "frames", "height", "width", "caption"} |
| empty.safetensors | text states of the caption "" |

A shard is written under a hidden name, forced to disk and renamed; only then its lines are appended to the index and
forced to disk. So the tensors that an index names are complete, whenever the writer was killed; a truncated line is
ignored. Rows of zeros at the end of text states (padding) are left out, and restored when they are read.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mindspeed_mm.data.generation.buckets import Bucket
from mindspeed_mm.data.media.stacking import Tensors
from mindspeed_mm.utils.errors import ConfigError, DataError
from mindspeed_mm.utils.files import fsync_path

ABOUT, EMPTY = "features.json", "empty.safetensors"
_SHARD = re.compile(r"\.?features-(\d+)-(\d+)\.safetensors(\.tmp)?")
_INDEX = re.compile(r"index-(\d+)\.jsonl")
_OPEN_FILES = 64
_SINGLE = ("latents", "latents_std")


class FeatureWriter:
    """Writes the features of one rank; continues after a run that was killed.

    Args:
        directory: The folder; created if it doesn't exist.
        rank, world_size: Number of the process, and of processes that write; may differ from those of the run before.
        made_from: The settings that decide the features: autoencoder, text encoders, dtypes … (JSON), the same for all
            ranks.
        shard_bytes: A shard is closed when it reaches this size.

    Attributes:
        done: rows of all ranks that existed when the writer was built.

    Raises:
        ConfigError: The folder has features of other settings.
    """

    def __init__(
        self,
        directory: str | Path,
        rank: int = 0,
        world_size: int = 1,
        made_from: Mapping[str, Any] | None = None,
        shard_bytes: int = 1 << 30,
    ) -> None:
        self.directory = Path(directory)
        self.rank, self.world_size = rank, world_size
        self._shard_bytes = shard_bytes
        self.directory.mkdir(parents=True, exist_ok=True)
        _claim(self.directory, json.loads(json.dumps(dict(made_from or {}))))
        self._clear_remains()
        self.done = {entry["row"] for entry in read_index(_indexes(self.directory))}
        self._number = 1 + max((n for r, n, _ in _shards(self.directory) if r == rank), default=-1)
        self._tensors: dict[str, torch.Tensor] = {}
        self._lines: list[dict[str, Any]] = []
        self._lengths: dict[str, str] = {}
        self._bytes = 0

    def rows(self, num_rows: int) -> list[int]:
        """Return the rows of this rank that don't exist yet."""
        return [row for row in range(self.rank, num_rows, self.world_size) if row not in self.done]

    def add(self, row: int, tensors: Tensors, shape: Sequence[int], caption: str = "") -> None:
        """Add a sample; it is durable after the next shard is closed.

        Args:
            row: Its number in the data set.
            tensors: latents [C, T', H', W'], latents_std, text.<name> and cond.<name>; kept in their dtypes.
            shape: Frames, and height and width in pixels.
            caption: Caption of the clip, for readers of the index.
        """
        if "latents" not in tensors:
            raise ValueError(f"row {row}: no latents among {', '.join(tensors)}")
        file = _shard_name(self.rank, self._number)
        for name, tensor in tensors.items():
            if name not in _SINGLE and not name.startswith(("text.", "cond.")):
                expected = "latents, latents_std, text.<name> or cond.<name>"
                raise ValueError(f"row {row}: tensor {name!r}; expected {expected}")
            kept = _trimmed(tensor.detach().cpu()) if name.startswith("text.") else tensor.detach().cpu()
            if kept.shape != tensor.shape:
                self._lengths[f"{row}.{name}"] = str(len(tensor))
            kept = kept.clone(memory_format=torch.contiguous_format)
            self._tensors[f"{row}.{name}"] = kept
            self._bytes += kept.numel() * kept.element_size()
        frames, height, width = (int(number) for number in shape)
        line = {"row": int(row), "file": file, "key": str(row), "frames": frames, "height": height, "width": width}
        self._lines.append({**line, "caption": caption})
        if self._bytes >= self._shard_bytes:
            self.flush()

    def write_empty(self, states: Tensors) -> None:
        """Write the text states of the caption "": text.<name> each; an existing file is kept."""
        path = self.directory / EMPTY
        if not path.exists():
            kept = {name: tensor.detach().cpu().clone() for name, tensor in states.items()}
            _save(kept, path, {}, f".{EMPTY}.{self.rank}.tmp")

    def flush(self) -> None:
        """Close the shard; added samples are durable then."""
        if not self._lines:
            return
        name = _shard_name(self.rank, self._number)
        _save(self._tensors, self.directory / name, self._lengths, f".{name}.tmp")
        with open(self.directory / f"index-{self.rank}.jsonl", "a", encoding="utf-8") as index:
            index.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in self._lines)
            index.flush()
            os.fsync(index.fileno())
        fsync_path(self.directory)
        self._tensors, self._lines, self._lengths, self._bytes = {}, [], {}, 0
        self._number += 1

    def close(self) -> None:
        """The same as `flush`."""
        self.flush()

    def __enter__(self) -> FeatureWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()

    def _clear_remains(self) -> None:
        """Cut off torn lines, and delete shards that no index names, of the ranks whose work this one continues."""
        for path in _indexes(self.directory):
            if self._is_mine(int(_INDEX.fullmatch(path.name)[1])):  # type: ignore[index]
                _cut_torn_line(path)
        named = {entry["file"] for entry in read_index(_indexes(self.directory))}
        for rank, _, path in _shards(self.directory):
            if self._is_mine(rank) and path.name not in named:
                path.unlink()

    def _is_mine(self, rank: int) -> bool:
        return rank % self.world_size == self.rank


def _claim(directory: Path, made_from: dict[str, Any]) -> None:
    """Write features.json, or compare it with the existing one."""
    path = directory / ABOUT
    if not path.exists():
        # ranks may write it at the same time: the last one wins, with the same content
        temporary = directory / f".{ABOUT}.{os.getpid()}.tmp"
        temporary.write_text(json.dumps({"made_from": made_from}, ensure_ascii=False, indent=1) + "\n", "utf-8")
        fsync_path(temporary)
        os.replace(temporary, path)
        fsync_path(directory)
        return
    there = _read_about(path)
    for key in sorted({*there, *made_from}):
        if there.get(key) != made_from.get(key):
            raise ConfigError(
                f"{path}: features there were made with {key} {json.dumps(there.get(key))}, and now it is "
                f"{json.dumps(made_from.get(key))}; write to another folder, or delete this one"
            )


def _read_about(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text("utf-8"))["made_from"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: can't be read: {error}") from None


def _shard_name(rank: int, number: int) -> str:
    return f"features-{rank}-{number}.safetensors"


def _shards(directory: Path) -> list[tuple[int, int, Path]]:
    """(rank, number, path) of shards, complete and incomplete ones."""
    found = ((_SHARD.fullmatch(path.name), path) for path in directory.iterdir())
    return [(int(match[1]), int(match[2]), path) for match, path in found if match]


def _indexes(directory: Path) -> list[Path]:
    found = [path for path in directory.iterdir() if _INDEX.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(_INDEX.fullmatch(path.name)[1]))  # type: ignore[index]


def _cut_torn_line(path: Path) -> None:
    with open(path, "rb+") as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            file.truncate(whole)
            os.fsync(file.fileno())


def read_index(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the entries of index files; a last line without its end is ignored.

    Raises:
        DataError: A line isn't an entry; features of another kind.
    """
    entries = []
    for path in paths:
        try:
            lines = path.read_bytes().split(b"\n")[:-1]
        except OSError as error:
            raise DataError(f"{path}: can't be read: {error.strerror or error}") from None
        for number, line in enumerate(lines, start=1):
            try:
                entry = json.loads(line)
            except ValueError as error:
                raise DataError(f"{path}, line {number}: not JSON: {error}") from None
            if not isinstance(entry, dict) or not {"row", "file", "key", "frames", "height", "width"} <= entry.keys():
                raise DataError(_not_an_entry(path, number, line))
            entries.append(entry)
    return entries


def _not_an_entry(path: Path, number: int, line: bytes) -> str:
    if re.search(rb"\.(pt|pth|bin|pkl)\"", line):
        return (
            f"{path}, line {number}: features in .pt files are pickles, which can run any code, and aren't read; make "
            "them anew by running the feature extraction again, which writes safetensors"
        )
    return f"{path}, line {number}: expected row, file, key, frames, height and width; found {line[:80]!r}"


def _trimmed(tensor: torch.Tensor) -> torch.Tensor:
    """Leave out rows of zeros at the end; of a tensor of two dimensions and more."""
    if tensor.dim() < 2 or not tensor.numel():
        return tensor
    bits = tensor.contiguous().reshape(len(tensor), -1).view(torch.uint8)  # minus zero isn't zero
    filled = bits.any(1).nonzero()
    return tensor[: max(1, int(filled[-1]) + 1 if len(filled) else 0)]


def _save(tensors: Mapping[str, torch.Tensor], path: Path, metadata: Mapping[str, str], hidden: str) -> None:
    from safetensors.torch import save_file

    temporary = path.with_name(hidden)
    save_file(dict(tensors), temporary, dict(metadata))
    fsync_path(temporary)
    os.replace(temporary, path)
    fsync_path(path.parent)


def not_finite(tensors: Tensors) -> str | None:
    """Return the name of a tensor with NaN or infinite values, and their number; None: all are finite."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not (finite := torch.isfinite(tensor)).all():
            return f"{name} has {int((~finite).sum())} of {tensor.numel()} values that are NaN or infinite"
    return None


class FeatureReader:
    """Reads features. Instances can be pickled and forked; files are opened when a sample is read.

    Args:
        paths: A folder of features, or its index files.

    Attributes:
        rows: [samples] int64, increasing: numbers of the samples' rows in their data set; those of a further folder
            follow the last one before.
        shapes: shape of each sample, as an index into `buckets`: [samples] int32.
        buckets: distinct shapes, sorted.
        made_from: settings in features.json.

    Raises:
        DataError: There are no features, or an index can't be read.
    """

    def __init__(self, paths: Sequence[str | Path]) -> None:
        indexes: dict[Path, list[Path]] = {}
        for index in (index for path in paths for index in _indexes_at(Path(path))):
            indexes.setdefault(index.parent, []).append(index)
        self.directories = list(indexes)
        ordered: list[tuple[int, Path, dict[str, Any]]] = []
        for directory, parts in indexes.items():
            after = ordered[-1][0] + 1 if ordered else 0
            entries = {entry["row"]: entry for entry in read_index(parts)}
            ordered += [(after + row, directory, entries[row]) for row in sorted(entries)]
        if not ordered:
            raise DataError(f"no features in {', '.join(str(path) for path in paths)}")
        self._files = sorted({(directory, entry["file"]) for _, directory, entry in ordered})
        numbers = {file: number for number, file in enumerate(self._files)}
        shapes = [Bucket(entry["frames"], entry["height"], entry["width"]) for _, _, entry in ordered]
        self.buckets = sorted(set(shapes))
        places = {bucket: place for place, bucket in enumerate(self.buckets)}
        self.rows = np.array([row for row, _, _ in ordered], dtype=np.int64)
        self.shapes = np.array([places[shape] for shape in shapes], dtype=np.int32)
        self._file_of = np.array([numbers[folder, entry["file"]] for _, folder, entry in ordered], dtype=np.int32)
        self._keys = np.array([entry["key"] for _, _, entry in ordered])
        about = self.directories[0] / ABOUT
        self.made_from = _read_about(about) if about.exists() else {}
        self._indexes = indexes
        self._opened: OrderedDict[int, tuple[Any, dict[str, str], dict[str, list[str]]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, index: int) -> str:
        """Name a sample, for messages."""
        directory, file = self._files[self._file_of[index]]
        return f"{directory / file}, sample {self._keys[index]}"

    def names(self, index: int) -> list[str]:
        """Return the names of a sample's tensors."""
        _, _, names = self._open(int(self._file_of[index]))
        found = names.get(str(self._keys[index]), [])
        if "latents" not in found:
            raise DataError(f"{self.where(index)}: no latents; found {', '.join(found) or 'nothing'}")
        return found

    def kinds(self) -> list[str]:
        """Return the names of the tensors that samples have: that is, of the first one whose file can be read."""
        firsts = np.unique(self._file_of, return_index=True)[1]
        for index in np.sort(firsts).tolist()[:-1]:
            with contextlib.suppress(DataError):
                return self.names(index)
        return self.names(int(firsts.max()))

    def shape_of(self, index: int, name: str) -> list[int]:
        """Return the shape of a tensor; it isn't read."""
        handle, lengths, _ = self._open(int(self._file_of[index]))
        key = f"{self._keys[index]}.{name}"
        shape = list(handle.get_slice(key).get_shape())
        return [int(lengths[key]), *shape[1:]] if key in lengths else shape

    def read(self, index: int) -> dict[str, torch.Tensor]:
        """Return the tensors of a sample, as they were added.

        Raises:
            DataError: The file is missing or damaged, or values in it aren't finite.
        """
        handle, lengths, _ = self._open(int(self._file_of[index]))
        tensors = {}
        for name in self.names(index):
            key = f"{self._keys[index]}.{name}"
            tensor = handle.get_tensor(key)
            if key in lengths:
                whole = tensor.new_zeros((int(lengths[key]), *tensor.shape[1:]))
                whole[: len(tensor)] = tensor
                tensor = whole
            tensors[name] = tensor
        if problem := not_finite(tensors):
            raise DataError(f"{self.where(index)}: {problem}; make the features again, with encoders of another dtype")
        return tensors

    def captions(self) -> list[str]:
        """Return the captions of all samples; the index is read again."""
        found = []
        for parts in self._indexes.values():
            entries = {entry["row"]: str(entry.get("caption", "")) for entry in read_index(parts)}
            found += [entries[row] for row in sorted(entries)]
        return found

    def empty(self) -> dict[str, torch.Tensor] | None:
        """Return the text states of the caption ""; None: there are none.

        Raises:
            DataError: Values in it aren't finite.
        """
        from safetensors.torch import load_file

        path = self.directories[0] / EMPTY
        states = load_file(path) if path.exists() else None
        if problem := not_finite(states or {}):
            raise DataError(f"{path}: {problem}; make the features again, with encoders of another dtype")
        return states

    def _open(self, number: int) -> tuple[Any, dict[str, str], dict[str, list[str]]]:
        if number not in self._opened:
            from safetensors import SafetensorError, safe_open

            directory, file = self._files[number]
            try:
                handle = safe_open(directory / file, "pt")
            except (OSError, SafetensorError) as error:
                raise DataError(f"{directory / file}: features can't be read: {error}") from None
            names: dict[str, list[str]] = {}
            for key in handle.keys():  # noqa: SIM118 (it isn't a mapping)
                sample, _, name = key.partition(".")
                names.setdefault(sample, []).append(name)
            self._opened[number] = handle, handle.metadata() or {}, names
            if len(self._opened) > _OPEN_FILES:
                self._opened.popitem(last=False)
        self._opened.move_to_end(number)
        return self._opened[number]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": OrderedDict()}


def _indexes_at(path: Path) -> list[Path]:
    """The index files of a folder, or the named one; other published names are replaced by their folder."""
    if path.is_dir():
        found = _indexes(path)
        if not found:
            raise DataError(f"{path}: no index-<rank>.jsonl in it; was the feature extraction run?")
        return found
    if path.is_file():
        return [path]
    if path.parent.is_dir() and _indexes(path.parent):
        return _indexes(path.parent)
    raise DataError(f"{path}: no such folder or index of features")
