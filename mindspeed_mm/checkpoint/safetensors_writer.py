"""Write a safetensors file tensor by tensor: names, shapes and dtypes are needed in advance, but not the values.

The writer of the safetensors library needs all tensors of a file in memory together.
Source: the format as the safetensors library documents it: 8 bytes little-endian length, a JSON header padded with
spaces to a multiple of 8, then the tensors' bytes, row-major, without holes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import torch

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


class SafetensorsWriter:
    """An open safetensors file; tensors may be written in any order, each exactly once."""

    def __init__(self, path: Path, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        """
        Args:
            tensors: name → (shape, dtype) of all tensors of the file.
        """
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._left: dict[str, tuple[int, int, torch.dtype]] = {}
        position = 0
        # wide dtypes first, so that every tensor lies at a multiple of its element size
        for name in sorted(tensors, key=lambda n: (-tensors[n][1].itemsize, n)):
            shape, dtype = tensors[name]
            size = tensor_bytes(shape, dtype)
            header[name] = {
                "dtype": _NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [position, position + size],
            }
            self._left[name] = (position, size, dtype)
            position += size
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
        text += b" " * (-len(text) % 8)
        self._start = 8 + len(text)
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor's values at their position, converted to the announced dtype."""
        position, size, dtype = self._left.pop(name)
        value = tensor.detach().to(dtype).contiguous().reshape(-1).view(torch.uint8)
        if value.numel() != size:
            raise ValueError(f"'{name}': {value.numel()} bytes instead of the {size} announced")
        self._file.seek(self._start + position)
        self._file.write(value.numpy().data)

    def close(self) -> None:
        """Sync the file to disk and close it.

        Raises:
            ValueError: an announced tensor has not been written.
        """
        if self._left:
            raise ValueError(f"'{self._file.name}': {sorted(self._left)[0]} was never written")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self._file.close()


def tensor_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the size of a tensor's values in bytes."""
    count = 1
    for length in shape:
        count *= length
    return count * dtype.itemsize
