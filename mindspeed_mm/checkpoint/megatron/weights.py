"""Load weights of transformers' layout into Megatron-core chunks on tensor-parallel ranks and pipeline stages."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from mindspeed_mm.checkpoint.lazy import Node, Region, leaf
from mindspeed_mm.checkpoint.megatron.parts import SourceRegion
from mindspeed_mm.models.common.base_model import init_function
from mindspeed_mm.parallel.materialize import draw_own_parameters
from mindspeed_mm.utils.adapter_names import is_adapter, stored_name

_THREADS = min(4, os.cpu_count() or 1)  # reading is waiting for the disk, or for pages to be mapped


def fill(
    targets: Iterable[tuple[SourceRegion, torch.Tensor]], values: Mapping[str, Node], *, in_order: bool = False
) -> None:
    """Fill tensors; each rank reads only its parts of `values`.

    Args:
        targets: parts of transformers' tensors, with the tensors that contain them.
        values: name in the transformers model → expression; targets without a value stay unchanged.
        in_order: read one tensor after the other, as random values of a module are drawn together.
    """
    work = [(part, tensor, values[part.source]) for part, tensor in targets if part.source in values]
    if in_order:
        for item in sorted(work, key=lambda item: item[0].source):
            _fill(*item)
        return
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="load-weights") as pool:
        for _ in pool.map(lambda item: _fill(*item), work):
            pass


@torch.no_grad()  # the mode is thread-local
def _fill(part: SourceRegion, tensor: torch.Tensor, node: Node) -> None:
    if len(part.pieces) == 1:
        node.read_into(part.region, part.value(tensor))
    else:
        part.put(tensor, node.read(part.region))


def random_weights(meta_model: Any, seed: int) -> dict[str, Node]:
    """Return random values for the parameters of a transformers model, drawn module by module when they are read.

    They equal the values that `initialize_from_names` draws, as they depend only on the seed and the module's name.

    Args:
        meta_model: the transformers model, on the meta device.
    """
    draws = _Draws(meta_model, seed)
    values: dict[str, Node] = {}
    for name, param in meta_model.named_parameters():
        if not is_adapter(name):
            values[stored_name(name)] = leaf(name, param.shape, param.dtype, draws.read).node
    return values


class _Draws:
    """Draws the parameters of a module whole, in host memory, and caches those of the last module."""

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
                self._values = draw_own_parameters(module, stored_name(module_name), initialize, self._seed)
                self._module = module_name
            value = self._values[own]
        for dim, (start, length) in enumerate(region):
            value = value.narrow(dim, start, length)
        return value
