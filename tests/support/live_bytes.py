"""The bytes of the tensors that are alive while a function runs."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from mindspeed_mm import accelerator
from mindspeed_mm.accelerator.cpu import CPUAccelerator


class LiveBytes(TorchDispatchMode):
    """Counts the storages of all tensors that operators return while it is entered; those of before don't count.

    What a kernel allocates for itself is not seen. Works on fake tensors too.

    Attributes:
        alive: bytes that are alive now.
        peak: the largest sum of bytes that were alive at once.
        largest: elements of the largest tensor that was returned.
        operators: how many were dispatched.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive, self.peak, self.largest, self.operators = 0, 0, 0, 0
        self._seen = WeakIdKeyDictionary()
        self._is_host = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors((args, kwargs)):
            self._seen.setdefault(tensor.untyped_storage(), None)
        result = func(*args, **(kwargs or {}))
        self.operators += 1
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage not in self._seen:
                self._seen[storage] = None
                if self._is_host:
                    continue
                size = storage.nbytes()
                self.alive += size
                weakref.finalize(storage, self._free, size).atexit = False
            self.largest = max(self.largest, tensor.numel())
        self.peak = max(self.peak, self.alive)
        return result

    def _free(self, size: int) -> None:
        self.alive -= size

    def host_memory(self, like: torch.Tensor) -> torch.Tensor:
        """An empty tensor like another one, whose bytes don't count."""
        with mock.patch.object(self, "_is_host", True):
            return torch.empty(like.shape, dtype=like.dtype)


@contextmanager
def live_bytes_of_a_device() -> Iterator[LiveBytes]:
    """Count the bytes that are alive outside of what the package calls the host's memory."""
    with LiveBytes() as live, mock.patch.object(CPUAccelerator, "host_memory", lambda _, like: live.host_memory(like)):
        assert accelerator.current().is_host
        yield live


def _tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors of a tree; of a sharded one, this rank's part."""
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided]
    return [tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in tensors]
