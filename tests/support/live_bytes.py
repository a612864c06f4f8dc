"""The bytes of the tensors that are alive while a function runs."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors((args, kwargs)):
            self._seen.setdefault(tensor.untyped_storage(), None)
        result = func(*args, **(kwargs or {}))
        self.operators += 1
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage not in self._seen:
                self._seen[storage] = None
                size = storage.nbytes()
                self.alive += size
                weakref.finalize(storage, self._free, size).atexit = False
            self.largest = max(self.largest, tensor.numel())
        self.peak = max(self.peak, self.alive)
        return result

    def _free(self, size: int) -> None:
        self.alive -= size


def _tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors of a tree; of a sharded one, this rank's part."""
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided]
    return [tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in tensors]
