"""Sources of weights: safetensors files, torch_dcp folders and `.bin` files, each read region by region."""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from mindspeed_mm.checkpoint.dcp_reader import METADATA, DcpReader, ReadRequest
from mindspeed_mm.checkpoint.lazy import LazyTensor, Region, leaf
from mindspeed_mm.configs.hf_directory import describe_missing_model
from mindspeed_mm.utils.errors import CheckpointError
from mindspeed_mm.utils.log import notice

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
}
# in the order in which transformers and diffusers look for them
_SAFETENSORS = ("model.safetensors", "diffusion_pytorch_model.safetensors")
_BIN = ("pytorch_model.bin", "diffusion_pytorch_model.bin")
# a rounded or averaged copy of the weights: diffusion_pytorch_model.fp16[-00001-of-00002].safetensors
_VARIANT = re.compile(r"(?:diffusion_pytorch_|pytorch_)?model\.([\w-]+?)(?:-\d{5}-of-\d{5})?\.(safetensors|bin)")
_AVERAGE = "ema."


class WeightSource(Protocol):
    """Tensors by name.

    Attributes:
        path: file or directory, for messages.
        in_hub_layout: whether names and shapes are those of the hub and need conversion; False: those of the model.
    """

    path: Path
    in_hub_layout: bool

    def tensors(self) -> dict[str, LazyTensor]:
        """Return all tensors by name, without reading them."""


class SafetensorsWeights:
    """The safetensors files of a directory; regions are views of the mapped files.

    Attributes:
        absent: names in the index that no file contains.
    """

    in_hub_layout = True

    def __init__(self, path: Path, files: list[Path], index: dict[str, str] | None = None) -> None:
        """
        Args:
            index: name → file name; None: take all tensors of the files.
        """
        self.path = path
        self._place: dict[str, Any] = {}
        for file in files:
            opened = _open(file)
            for name in opened.keys():  # noqa: SIM118 (no mapping)
                if index is not None and index.get(name) != file.name:
                    continue
                if name in self._place:
                    raise CheckpointError(
                        f"'{path}': weight '{name}' is in two files ({file.name} is one of them) and no index says "
                        "which counts; remove the files that don't belong"
                    )
                self._place[name] = opened
        self.absent = [name for name in index or () if name not in self._place]

    def tensors(self) -> dict[str, LazyTensor]:
        """See WeightSource."""
        found = {}
        for name, opened in self._place.items():
            part = opened.get_slice(name)
            dtype = _DTYPES.get(part.get_dtype())
            if dtype is None:
                raise CheckpointError(
                    f"'{self.path}': weight '{name}' has dtype {part.get_dtype()}, which can't be read; expected one "
                    f"of {', '.join(_DTYPES)}"
                )
            found[name] = leaf(name, part.get_shape(), dtype, self._read, keeps_dtype=True)
        return found

    def _read(self, name: str, region: Region) -> torch.Tensor:
        part = self._place[name].get_slice(name)
        if not region:
            return self._place[name].get_tensor(name)
        return part[tuple(slice(start, start + length) for start, length in region)]


class DcpWeights:
    """The tensors of a torch_dcp folder, without those of the optimizer and the averages."""

    in_hub_layout = False

    def __init__(self, path: Path, *, averaged: bool = False) -> None:
        """
        Args:
            averaged: take the averages (--ema-decay) instead of their weights.

        Raises:
            CheckpointError: `averaged` is set and there are no averages.
        """
        self.path = path
        self.reader = DcpReader(path)
        of = {f"model.{n.removeprefix(_AVERAGE)}": n for n in self.reader.tensors if n.startswith(_AVERAGE)}
        if averaged and not of:
            raise CheckpointError(f"'{path}' holds no averaged weights; its run was not given --ema-decay")
        self._averages = of if averaged else {}

    def tensors(self) -> dict[str, LazyTensor]:
        """See WeightSource."""
        found = {}
        for name in self.reader.tensors:
            if not name.startswith(("optimizer.", "opt_param_scheduler.", _AVERAGE)):
                stored = self._averages.get(name, name)
                shape, dtype = self.reader.shape(stored), self.reader.dtype(stored)
                found[name] = leaf(stored, shape, dtype, self._read, keeps_dtype=True)
        return found

    def _read(self, name: str, region: Region) -> torch.Tensor:
        out = torch.empty([length for _, length in region], dtype=self.reader.dtype(name))
        self.reader.read_into([ReadRequest(name, region, out)])
        return out


class BinWeights:
    """`.bin` files: pickles of tensors, memory-mapped if torch supports it for the file."""

    in_hub_layout = True

    def __init__(self, path: Path, files: list[Path], *, allow_pickle: bool) -> None:
        self.path = path
        self._values: dict[str, torch.Tensor] = {}
        for file in files:
            content = _load_pickle(file, allow_pickle)
            self._values |= {k: v for k, v in content.items() if isinstance(v, torch.Tensor)}

    def tensors(self) -> dict[str, LazyTensor]:
        """See WeightSource."""
        return {
            name: leaf(name, value.shape, value.dtype, self._read, keeps_dtype=True)
            for name, value in self._values.items()
        }

    def _read(self, name: str, region: Region) -> torch.Tensor:
        return self._values[name][tuple(slice(start, start + length) for start, length in region)]


def is_dcp(path: Path) -> bool:
    """Whether `path` is a torch_dcp folder."""
    return (path / METADATA).is_file()


def has_weight_files(path: Path) -> bool:
    """Whether `path` looks like a HF directory with weights."""
    return (
        any(path.glob("*.safetensors"))
        or any((path / n).is_file() for n in (*_BIN, *(f"{b}.index.json" for b in _BIN)))
        or bool(_variants(path))
    )


def open_weights(path: str | Path, *, allow_pickle: bool = False) -> WeightSource:
    """Open a HF directory (safetensors, or without them `.bin` files) or a torch_dcp folder.

    Files of a variant (`diffusion_pytorch_model.fp16.safetensors`) are read only if there are no others, with a notice.

    Args:
        allow_pickle: also unpickle `.bin` files with other objects than tensors (--allow-unsafe-pickle).

    Raises:
        CheckpointError: there are no weights, or a file is missing, damaged or unsafe.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"weights: {describe_missing_model(path)}")
    if is_dcp(path):
        return DcpWeights(path)
    for name in _SAFETENSORS:
        if (path / name).is_file():
            return SafetensorsWeights(path, [path / name])
        if (path / f"{name}.index.json").is_file():
            index = _read_index(path, f"{name}.index.json")
            return SafetensorsWeights(path, _indexed_files(path, f"{name}.index.json", index), index)
    loose = sorted(f for f in path.glob("*.safetensors") if not _VARIANT.fullmatch(f.name))
    if loose:
        return SafetensorsWeights(path, loose)
    for name in _BIN:
        if (path / name).is_file():
            return BinWeights(path, [path / name], allow_pickle=allow_pickle)
        if (path / f"{name}.index.json").is_file():
            index = _read_index(path, f"{name}.index.json")
            return BinWeights(path, _indexed_files(path, f"{name}.index.json", index), allow_pickle=allow_pickle)
    files = _only_variant(path)
    if files and files[0].suffix == ".safetensors":
        return SafetensorsWeights(path, files)
    if files:
        return BinWeights(path, files, allow_pickle=allow_pickle)
    raise CheckpointError(
        f"'{path}' holds no weights; expected *.safetensors or a torch_dcp checkpoint; it holds {listing(path)}"
    )


def _variants(path: Path) -> dict[str, list[Path]]:
    """Return files by variant; safetensors files are preferred to `.bin` files of the same variant."""
    found: dict[str, dict[str, list[Path]]] = {}
    for file in sorted(path.iterdir()) if path.is_dir() else ():
        match = _VARIANT.fullmatch(file.name)
        if match:
            found.setdefault(match[1], {}).setdefault(match[2], []).append(file)
    return {name: kinds.get("safetensors") or kinds["bin"] for name, kinds in found.items()}


def _only_variant(path: Path) -> list[Path]:
    variants = _variants(path)
    if not variants:
        return []
    if len(variants) > 1:
        raise CheckpointError(
            f"'{path}' holds weights in the variants {', '.join(variants)} and none without a variant's name; leave "
            "the files of one of them"
        )
    ((name, files),) = variants.items()
    notice(f"'{path}' holds weights in the variant '{name}' only ({files[0].name}); they are taken as they are")
    return files


def listing(path: Path) -> str:
    """Return the first names in a directory, for messages."""
    if not path.is_dir():
        return "nothing (no such directory)"
    names = sorted(p.name for p in path.iterdir() if not p.name.startswith("."))
    return ", ".join(names[:8]) + (" …" if len(names) > 8 else "") if names else "nothing"


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"'{file}' ({file.stat().st_size} bytes) is damaged or no safetensors file: {error}; fetch it again"
        ) from error


def _read_index(path: Path, name: str) -> dict[str, str]:
    try:
        index = json.loads((path / name).read_text(encoding="utf-8"))["weight_map"]
        return {str(k): str(v) for k, v in index.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"'{path / name}' can't be read ({error}); expected an object with weight_map") from error


def _indexed_files(path: Path, name: str, index: dict[str, str]) -> list[Path]:
    files = sorted(set(index.values()))
    outside = [f for f in files if Path(f).name != f or f in ("", ".", "..")]
    if outside:
        raise CheckpointError(f"'{path / name}' names the file '{outside[0]}', outside its directory; refused")
    missing = [f for f in files if not (path / f).is_file()]
    if missing:
        raise CheckpointError(
            f"'{path / name}' names {missing[0]} ({len(missing)} of {len(files)} files are missing); fetch what is "
            f"missing; the directory holds {listing(path)}"
        )
    return [path / f for f in files]


def _load_pickle(file: Path, allow_pickle: bool) -> dict[str, Any]:
    mappable = zipfile.is_zipfile(file)  # the format of torch.save since torch 1.6
    with open(file, "rb") as opened:
        if not mappable and opened.read(1) != pickle.PROTO:
            raise CheckpointError(
                f"'{file}' ({file.stat().st_size} bytes) is damaged or was not written by torch.save; fetch it again"
            )
    try:
        content = torch.load(file, map_location="cpu", mmap=mappable, weights_only=not allow_pickle)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"'{file}' holds more than tensors, and reading it could run code of its author's choosing; convert it to "
            "safetensors, or, if you trust where it comes from, add --allow-unsafe-pickle"
        ) from error
    except Exception as error:  # a damaged pickle raises almost anything
        raise CheckpointError(f"'{file}' can't be read: {error or type(error).__name__}") from error
    if allow_pickle:
        notice(f"'{file}' was unpickled without restriction (--allow-unsafe-pickle)")
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    if not isinstance(content, dict):
        raise CheckpointError(f"'{file}' holds {type(content).__name__}; expected names and tensors")
    return content


def shown(names: Iterable[str], limit: int = 5) -> str:
    """Return the first few of many names, for messages."""
    names = sorted(names)
    return ", ".join(names[:limit]) + (f" … ({len(names)} in all)" if len(names) > limit else "")
