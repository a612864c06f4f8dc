"""Read tensors, or regions of them, from a folder of torch's distributed checkpoint format, safely and per rank.

Each rank reads the regions that it needs, without collectives. torch unpickles `.metadata` without restriction; here
only torch's own metadata classes are admitted.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from mindspeed_mm.checkpoint.agreement import first_line
from mindspeed_mm.checkpoint.lazy import Region
from mindspeed_mm.utils.errors import CheckpointError

METADATA = ".metadata"

_DTYPES = {str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)}
# the classes in a `.metadata` file; none of them can run code of the file
_ADMITTED = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch": {"Size", *_DTYPES},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath"},
}


def _member(kind: Any, name: Any) -> Enum:
    """Replace `getattr`, which Python 3.11.0 to 3.11.3 use to pickle members of enumerations; only finds members."""
    if not (isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__):
        raise pickle.UnpicklingError(f"it asks for {name!r} of {kind!r}, which has no place in checkpoint metadata")
    return kind[name]


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (("builtins", "getattr"), ("__builtin__", "getattr")):
            return _member
        if module == "pathlib._local":  # where Python 3.13 has them; others can't import it
            module = "pathlib"
        if name not in _ADMITTED.get(module, ()):
            raise pickle.UnpicklingError(f"it holds {module}.{name}, which has no place in checkpoint metadata")
        return super().find_class(module, name)


def read_metadata(directory: Path) -> Metadata:
    """Read `.metadata` of a folder, admitting torch's metadata classes only.

    Raises:
        CheckpointError: it is missing, damaged, contains other classes, or names files outside the folder.
    """
    path = directory / METADATA
    try:
        with open(path, "rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except FileNotFoundError:
        raise CheckpointError(
            f"'{directory}' has no {METADATA}: it is no torch_dcp checkpoint, or was not finished"
        ) from None
    except Exception as error:  # a damaged pickle raises almost anything
        raise CheckpointError(f"'{path}' is refused or damaged: {error or type(error).__name__}") from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(
            f"'{path}' holds {type(metadata).__name__}; expected the metadata of a torch_dcp checkpoint"
        )
    if not _is_well_formed(metadata):
        raise CheckpointError(f"'{path}' is damaged: its entries don't describe tensors and where they are")
    for info in metadata.storage_data.values():
        _check_inside(directory, info.relative_path)
    if getattr(metadata, "storage_meta", None) is None:
        metadata.storage_meta = StorageMeta()
    return metadata


def _is_well_formed(metadata: Any) -> bool:
    """Whether the entries have the right types: unpickling sets attributes without checking them."""
    try:
        tensors = [e for e in metadata.state_dict_metadata.values() if isinstance(e, TensorStorageMetadata)]
        pieces = [piece for entry in tensors for piece in entry.chunks]
        sizes = [*(e.size for e in tensors), *(p.offsets for p in pieces), *(p.sizes for p in pieces)]
        return (
            all(isinstance(size, tuple) for size in sizes)
            and all(isinstance(entry.properties.dtype, torch.dtype) for entry in tensors)
            and all(isinstance(info.relative_path, str) for info in metadata.storage_data.values())
        )
    except (AttributeError, TypeError):
        return False


def _check_inside(directory: Path, relative: str) -> None:
    parts = PurePosixPath(relative).parts
    if not parts or parts[0] == "/" or ".." in parts:
        raise CheckpointError(f"'{directory / METADATA}' names the file '{relative}', outside its folder; refused")


@dataclass
class ReadRequest:
    """A region of a stored tensor and its target.

    Attributes:
        name: key in the checkpoint.
        region: (start, length) of each dimension.
        out: target of the values, which are converted to its dtype and moved to its device.
    """

    name: str
    region: Region
    out: torch.Tensor


class _SafeReader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return read_metadata(Path(self.path))


class _Placer:
    """The methods of torch's load planner that a reader calls: the target of each piece."""

    def __init__(self, requests: list[ReadRequest]) -> None:
        self._requests = requests

    def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
        assert item.dest_index.index is not None  # `read_into` numbers them
        target = self._requests[item.dest_index.index].out
        for dim, (start, length) in enumerate(zip(item.dest_offsets, item.lengths)):
            target = target.narrow(dim, start, length)
        return target

    def commit_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        pass


class DcpReader:
    """Tensors of a torch_dcp folder.

    Attributes:
        directory: the folder.
        tensors: key → its metadata (`size`, `properties.dtype`, `chunks`).
        other_keys: entries that are no tensors; they are pickles, which are never read.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.metadata = read_metadata(self.directory)
        entries = self.metadata.state_dict_metadata
        self.tensors = {k: v for k, v in entries.items() if isinstance(v, TensorStorageMetadata)}
        self.other_keys = sorted(k for k in entries if k not in self.tensors)
        self._reader = _SafeReader(self.directory)
        self._reader.set_up_storage_reader(self.metadata, is_coordinator=False)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a stored tensor."""
        return tuple(self.tensors[name].size)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a stored tensor."""
        return self.tensors[name].properties.dtype

    def read_into(self, requests: Iterable[ReadRequest]) -> None:
        """Read regions; each file is opened once, and at most one stored piece is in memory at a time.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        requests = list(requests)
        try:
            items = [item for number, request in enumerate(requests) for item in self._pieces(number, request)]
            with torch.no_grad():
                self._reader.read_data(LoadPlan(items), _Placer(requests))  # type: ignore[arg-type]
        except Exception as error:  # damaged metadata and files raise almost anything
            raise CheckpointError(f"checkpoint '{self.directory}' can't be read: {first_line(error)}") from error

    def _pieces(self, number: int, request: ReadRequest) -> list[ReadItem]:
        start = torch.Size([s for s, _ in request.region])
        length = torch.Size([n for _, n in request.region])
        if 0 in length:
            return []
        wanted = [ChunkStorageMetadata(start, length)]
        found = create_read_items_for_chunk_list(request.name, self.tensors[request.name], wanted)
        if sum(item.lengths.numel() for item in found) < length.numel():
            raise ValueError(f"its files don't hold all of {request.name}")
        return [replace(item, dest_index=replace(item.dest_index, index=number)) for item in found]
