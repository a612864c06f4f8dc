"""The media of a micro-batch over context-parallel ranks, for all towers of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from mindspeed_mm.models.common.build_context import current_build_context
from mindspeed_mm.models.common.idle_tower import Tower
from mindspeed_mm.models.contract import as_trainable
from mindspeed_mm.parallel.media import MediaShard, TowerSplit


class SplitMedia:
    """The towers of a model that encode a part of the media each rank."""

    def __init__(self, towers: Mapping[str, TowerSplit]) -> None:
        """
        Args:
            towers: path of a tower → how it is split.
        """
        self._towers = towers

    def cut(self, batch: dict[str, Any]) -> dict[str, MediaShard | None]:
        """Leave this rank's media in a prepared micro-batch, on the host, and return what `for_batch` needs."""
        return {path: tower.cut(batch) for path, tower in self._towers.items()}

    def for_batch(self, shards: Mapping[str, MediaShard | None]) -> None:
        """Set what `cut` has returned of the next forward pass's micro-batch; empty: every rank has all media."""
        for path, tower in self._towers.items():
            tower.for_batch(shards.get(path))


def split_media(model: nn.Module, towers: Iterable[Tower]) -> SplitMedia | None:
    """Split the towers of a model that can be split over the context-parallel ranks of the run.

    To be called before the model is wrapped.

    Args:
        model: the transformers model.
        towers: the towers of its traits.

    Returns:
        None if there is nothing to split, or fsdp2.yaml's `cp_split_media` is false.
    """
    context, config = current_build_context(), as_trainable(model).config
    world = context.world
    if world is None or world.context.size == 1 or (context.fsdp2 is not None and not context.fsdp2.cp_split_media):
        return None
    found = {
        tower.path: TowerSplit(model.get_submodule(tower.path), tower.split, config, tower.input_keys, world.context)
        for tower in towers
        if tower.split is not None and tower.split.is_possible(config)
    }
    return SplitMedia(found) if found else None
