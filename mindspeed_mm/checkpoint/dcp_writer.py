"""Write lazily read tensors to a torch_dcp folder, in one process, with one tensor in memory at a time."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import WriteItem

from mindspeed_mm.checkpoint.agreement import no_space
from mindspeed_mm.checkpoint.lazy import Node, whole


class _OnDemand(dcp.DefaultSavePlanner):
    """Plans with shapes only, and reads each tensor when it is written."""

    def __init__(self, values: Mapping[str, Node], progress: Callable[[int], None] | None) -> None:
        super().__init__()
        self._values, self._progress = values, progress

    def resolve_data(self, write_item: WriteItem) -> Any:
        node = self._values[write_item.index.fqn]
        value = node.read(whole(node.shape)).contiguous()
        if self._progress is not None:
            self._progress(value.nbytes)
        return value


def write_dcp(directory: Path, values: Mapping[str, Node], progress: Callable[[int], None] | None = None) -> list[str]:
    """Write `values` under their keys into `directory`; returns the names of the files, synced to disk.

    Args:
        progress: called with the number of bytes of each tensor.

    Raises:
        OSError: the folder can't be written. Errors of reading a value are raised unchanged.
    """
    shapes = {key: torch.empty(node.shape, dtype=node.dtype, device="meta") for key, node in values.items()}
    writer = dcp.FileSystemWriter(directory, sync_files=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.save(shapes, storage_writer=writer, planner=_OnDemand(values, progress), no_dist=True)
        except CheckpointException as error:  # torch's wrapper around any error, an interrupt too; no Exception itself
            cause = next(iter(error.failures.values()))[0]
            raise no_space(cause) or cause from error
    return sorted(p.name for p in directory.iterdir())
