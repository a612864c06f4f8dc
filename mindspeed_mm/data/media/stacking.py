"""Media tensors of several media, or of several samples, as one tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from mindspeed_mm.utils.errors import DataError

Tensors = Mapping[str, torch.Tensor]


def stack_media(parts: Sequence[Tensors], keys: Iterable[str], padded: Iterable[str] = ()) -> dict[str, torch.Tensor]:
    """Concatenate media tensors on dim 0.

    Args:
        parts: tensors by name, in order; each has some of the names.
        keys: the names wanted.
        padded: names of tensors whose other dimensions may differ: they are padded with zeros, at the end.

    Raises:
        DataError: other tensors whose dimensions differ.
    """
    allowed, stacked = set(padded), {}
    for key in dict.fromkeys(keys):
        tensors = [part[key] for part in parts if key in part]
        if not tensors:
            continue
        if len({tensor.shape[1:] for tensor in tensors}) > 1:
            if key not in allowed:
                shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors[:5])
                raise DataError(
                    f"media of one micro-batch have tensors '{key}' of different shapes ({shapes}), which this model "
                    "can't take together: use --micro-batch-size 1 without packing, or media of one size and number of "
                    "frames"
                )
            tensors = _filled(tensors)
        stacked[key] = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
    return stacked


def as_tensor(value: object) -> torch.Tensor:
    """Return a processor's output as a tensor; a list of pictures or of sounds is stacked on dim 0."""
    if isinstance(value, list | tuple) and value and isinstance(value[0], torch.Tensor):
        return torch.stack(list(value))
    if isinstance(value, list | tuple) and value and isinstance(value[0], np.ndarray):
        return torch.from_numpy(np.stack(value))
    return torch.as_tensor(value)


def _filled(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    shape = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    filled = []
    for tensor in tensors:
        whole = tensor.new_zeros(len(tensor), *shape)
        inside = tuple(slice(size) for size in tensor.shape)
        whole[inside] = tensor
        filled.append(whole)
    return filled
