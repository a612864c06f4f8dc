"""Gather transformers' tensors from the ranks that have parts of them in Megatron-core chunks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from mindspeed_mm.checkpoint.lazy import LazyTensor, Region, leaf
from mindspeed_mm.checkpoint.megatron.parts import Shape, SourceRegion


class GatheredParts:
    """Gathers whole tensors from their parts on all ranks; see `hf_export.Fetcher`.

    Each rank sends its parts of a tensor to the rank that writes the tensor, which assembles it.
    """

    def __init__(
        self, parts: Iterable[tuple[SourceRegion, torch.Tensor]], shapes: Mapping[str, Shape], group: dist.ProcessGroup
    ) -> None:
        """
        A collective.

        Args:
            parts: parts on this rank, with the tensors that contain them; each element of a tensor is in exactly one
                part of one rank.
            shapes: shapes of the transformers model's tensors.
            group: process group of all ranks, for tensors in host memory.
        """
        self._shapes, self._group, self._rank = shapes, group, dist.get_rank(group)
        self._parts: dict[str, list[tuple[SourceRegion, torch.Tensor]]] = {}
        for part, tensor in parts:
            self._parts.setdefault(part.source, []).append((part, tensor))
        own = {n: (found[0][1].dtype, [part.region for part, _ in found]) for n, found in self._parts.items()}
        gathered: list[dict[str, tuple[torch.dtype, list[Region]]]] = [{}] * dist.get_world_size(group)
        dist.all_gather_object(gathered, own, group=group)
        self._regions = {
            n: {r: parts_of[n][1] for r, parts_of in enumerate(gathered) if n in parts_of}
            for n in set().union(*gathered)
        }
        self._dtypes = {n: dtype for parts_of in gathered for n, (dtype, _) in parts_of.items()}
        self._whole: dict[str, torch.Tensor] = {}

    def tensors(self) -> dict[str, LazyTensor]:
        """See `Fetcher`."""
        return {n: leaf(n, self._shapes[n], self._dtypes[n], self._read) for n in self._shapes if n in self._dtypes}

    @torch.no_grad()
    def fetch(self, names: set[str], owner: int) -> None:
        """See `Fetcher`."""
        if self._rank == owner:
            self._whole = {name: self._gather(name) for name in sorted(names)}
            return
        for name in sorted(names):
            if name in self._parts:
                values = [part.value(tensor).detach().reshape(-1) for part, tensor in self._parts[name]]
                dist.send(torch.cat(values).to("cpu"), group=self._group, group_dst=owner)

    def _gather(self, name: str) -> torch.Tensor:
        whole = torch.empty(self._shapes[name], dtype=self._dtypes[name])
        for rank, regions in self._regions[name].items():
            if rank == self._rank:
                for part, tensor in self._parts[name]:
                    _part(whole, part.region).copy_(part.value(tensor))
                continue
            sizes = [[length for _, length in region] for region in regions]
            received = torch.empty(sum(math.prod(s) for s in sizes), dtype=whole.dtype)
            dist.recv(received, group=self._group, group_src=rank)
            for region, size, values in zip(regions, sizes, received.split([math.prod(s) for s in sizes]), strict=True):
                _part(whole, region).copy_(values.view(size))
        return whole

    def _read(self, name: str, region: Region) -> torch.Tensor:
        return _part(self._whole[name], region)


def _part(tensor: torch.Tensor, region: Sequence[tuple[int, int]]) -> torch.Tensor:
    for dim, (start, length) in enumerate(region):
        tensor = tensor.narrow(dim, start, length)
    return tensor
