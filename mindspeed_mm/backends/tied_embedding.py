"""The copies of a tied embedding on two pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mindspeed_mm.models.contract import Staged
from mindspeed_mm.parallel.world import World


class TiedEmbedding:
    """The two copies of a tied embedding: on the stage of the input embedding and on the last stage."""

    def __init__(self, weights: list[nn.Parameter], group: dist.ProcessGroup | None) -> None:
        self._weights, self._group = weights, group

    @torch.no_grad()
    def align(self) -> None:
        """Copy the embedding's values to the head, as a model that initialises itself may draw two different values.

        The embedding is the first copy: that of the first stage and the first chunk which have one.
        """
        if self._group is None:
            return
        first = self._weights[0].data
        if dist.get_world_size(self._group) > 1:
            dist.broadcast(first, dist.get_global_rank(self._group, 0), group=self._group)
        for other in self._weights[1:]:
            other.data.copy_(first)

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Replace both copies' gradients with their sum, so that the copies stay equal."""
        trained: list[Any] = [w for w in self._weights if w.requires_grad]
        if not trained or self._group is None:
            return
        total = trained[0].main_grad
        for other in trained[1:]:
            total.add_(other.main_grad)
        if dist.get_world_size(self._group) > 1:
            dist.all_reduce(total, group=self._group)
        for other in trained[1:]:
            other.main_grad.copy_(total)


def tied_embedding(
    stages: Sequence[Staged], world: World, pipeline: Sequence[int], timeout_minutes: float
) -> TiedEmbedding:
    """Find this rank's copies of a tied embedding and create a group with the ranks of the other one; a collective.

    Args:
        pipeline: ranks of this process's pipeline.
        timeout_minutes: time after which a collective of the group raises if a rank does not join.
    """
    tied = [copy for stage in stages if (copy := stage.tied_copy()) is not None]
    everywhere: list[Any] = [None] * world.size
    dist.all_gather_object(everywhere, (tuple(pipeline), bool(tied)), group=world.host.group)
    own_group = None
    for ranks in sorted({ranks for ranks, _ in everywhere}):
        owners = [rank for rank in ranks if everywhere[rank][1]]
        group = dist.new_group(owners, timeout=timedelta(minutes=timeout_minutes)) if owners else None
        if world.rank in owners:
            own_group = group
    return TiedEmbedding(tied, own_group)
