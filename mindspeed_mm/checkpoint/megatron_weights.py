"""Weights of transformers' layout into Megatron-core models split over tensor-parallel ranks and stages."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from mindspeed_mm.checkpoint.lazy import Node, Region, leaf
from mindspeed_mm.checkpoint.megatron_parts import SourceRegion
from mindspeed_mm.models.transformers.base_model import init_function
from mindspeed_mm.parallel.materialize import draw_own_parameters

_THREADS = min(4, os.cpu_count() or 1)  # reading is waiting for the disk, or for pages to be mapped


def fill(
    targets: Iterable[tuple[SourceRegion, torch.Tensor]], values: Mapping[str, Node], *, in_order: bool = False
) -> None:
    """Fill tensors, each rank reading its parts of `values` only.

    Args:
        targets: parts of transformers' tensors and the tensors that hold them.
        values: name in transformers' model → what it is; what is made of a name that is missing stays as it is.
        in_order: read one tensor after the other, as values that are drawn at random ask for.
    """
    work = [(part, tensor, values[part.source]) for part, tensor in targets if part.source in values]
    if in_order:
        for item in sorted(work, key=lambda item: item[0].source):
            _fill(*item)
        return
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="load-weights") as pool:
        for _ in pool.map(lambda item: _fill(*item), work):
            pass


@torch.no_grad()  # a thread of its own has a mode of its own
def _fill(part: SourceRegion, tensor: torch.Tensor, node: Node) -> None:
    if len(part.pieces) == 1:
        node.read_into(part.region, part.value(tensor))
    else:
        part.put(tensor, node.read(part.region))


def drawn(meta_model: Any, seed: int) -> dict[str, Node]:
    """Random values for the parameters of a transformers model, drawn when they are read, one module at a time.

    They are the ones that a model built and sharded in one piece draws: they depend on the seed and a module's name.

    Args:
        meta_model: the transformers model, on meta.
    """
    draws = _Draws(meta_model, seed)
    values: dict[str, Node] = {}
    for name, param in meta_model.named_parameters():
        values[name] = leaf(name, param.shape, param.dtype, draws.read).node
    return values


class _Draws:
    """Draws the parameters of a module whole, in host memory, and keeps those of the last one."""

    def __init__(self, meta_model: Any, seed: int) -> None:
        self._meta_model, self._seed = meta_model, seed
        self._module: str | None = None
        self._values: dict[str, torch.Tensor] = {}
        self._lock = threading.Lock()

    def read(self, name: str, region: Region) -> torch.Tensor:
        module_name, own = name.rpartition(".")[::2]
        with self._lock:
            if module_name != self._module:
                module = self._meta_model.get_submodule(module_name)
                initialize = init_function(self._meta_model, module, module_name)
                self._values = draw_own_parameters(module, module_name, initialize, self._seed)
                self._module = module_name
            value = self._values[own]
        for dim, (start, length) in enumerate(region):
            value = value.narrow(dim, start, length)
        return value
