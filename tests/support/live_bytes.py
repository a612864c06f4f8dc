"""The bytes of the tensors that are alive while a function runs."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storages of all tensors that operators return while it is entered; those of before don't count.

    What a kernel allocates for itself is not seen. Works on fake tensors too.

    Attributes:
        peak: the largest sum of bytes that were alive at once.
        largest: elements of the largest tensor that was returned.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak, self.largest = 0, 0
        # the references keep the addresses of storages that are gone from being used again
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._before: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors((args, kwargs)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._alive and storage._cdata not in self._before:
                self._before[storage._cdata] = StorageWeakRef(storage)
        result = func(*args, **(kwargs or {}))
        is_more = False
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._alive and storage._cdata not in self._before:
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                is_more = True
            self.largest = max(self.largest, tensor.numel())
        if is_more:
            self._alive = {key: kept for key, kept in self._alive.items() if not kept[0].expired()}
            self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return result


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided]
