"""The media of a micro-batch over context-parallel ranks, for all towers of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from mindspeed_mm.configs.fsdp2_config import Fsdp2Config
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


def towers_with_split_media(model: nn.Module, towers: Iterable[Tower], fsdp2: Fsdp2Config | None) -> dict[str, Tower]:
    """Return the towers whose media context-parallel ranks can share, by path.

    Args:
        model: the transformers model, which may be on the meta device.
        towers: the towers of its traits.
        fsdp2: fsdp2.yaml, whose `cp_split_media` may be false.
    """
    if fsdp2 is not None and not fsdp2.cp_split_media:
        return {}
    config = as_trainable(model).config
    return {t.path: t for t in towers if t.split is not None and t.split.is_possible(config)}


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
    if world is None or world.context.size == 1:
        return None
    found = {
        path: TowerSplit(model.get_submodule(path), tower.split, config, tower.input_keys, world.context)
        for path, tower in towers_with_split_media(model, towers, context.fsdp2).items()
        if tower.split is not None
    }
    return SplitMedia(found) if found else None
