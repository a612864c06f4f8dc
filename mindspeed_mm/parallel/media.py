"""Images and videos of a micro-batch split over the context-parallel ranks, for the towers that encode them.

Context-parallel ranks read the same rows, so each would encode all media of them. Instead each rank encodes a
contiguous part, balanced by patches, and the outputs are gathered in front of the language model. Every rank needs the
gradient of its own part of the outputs, which is the sum over the ranks of what they have used of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from mindspeed_mm.parallel.collectives import gather_rows
from mindspeed_mm.parallel.world import RankSet


@dataclass(frozen=True)
class MediaSplit:
    """How the media of a tower can be split.

    Attributes:
        outputs: fields of the tower's output whose first dimension is that of tokens, or of media; a field may be a
            list of such tensors. The tower's other fields are dropped.
        grids: batch field of media → batch field of their grids [media, 3], whose product is the number of rows of each
            in the former (Qwen-VL's way); empty: each row is one medium.
        rows_per_token: the tower's model configuration → number of rows that become one row of an output.
        is_possible: the tower's model configuration → whether `outputs` are all that the model takes of the tower.
    """

    outputs: tuple[str, ...]
    grids: Mapping[str, str] = field(default_factory=dict)
    rows_per_token: Callable[[Any], int] = lambda config: 1
    is_possible: Callable[[Any], bool] = lambda config: True


@dataclass
class MediaShard:
    """The media of a micro-batch that a rank encodes. All state is in fields, as it moves to the device in a batch.

    Attributes:
        sizes: of each rank, the rows of its outputs.
        grid: [media, 3] int64, the grids of this rank's media; None if there are no grids, or the tower's arguments
            hold them.
    """

    sizes: list[int]
    grid: torch.Tensor | None


class TowerSplit:
    """Lets a tower encode a part of the media, and gathers the outputs of all ranks."""

    def __init__(
        self, tower: nn.Module, split: MediaSplit, config: Any, input_keys: Sequence[str], ranks: RankSet
    ) -> None:
        """Replace the tower's forward method; to be called before the tower is wrapped.

        Args:
            tower: takes the media tensor first or as `pixel_values`, and `grid_thw` if there are grids.
            split: how its media can be split.
            config: configuration of the model.
            input_keys: batch fields with its media; a micro-batch has one of them at most.
            ranks: the context-parallel ranks.
        """
        self._split, self._input_keys, self._ranks = split, tuple(input_keys), ranks
        self._rows_per_token = split.rows_per_token(config)
        self._shard: MediaShard | None = None
        self._forward = tower.forward
        tower.forward = self._run  # type: ignore[method-assign]

    def cut(self, batch: dict[str, Any]) -> MediaShard | None:
        """Leave this rank's media in a prepared micro-batch, on the host; others than the media tensor stay whole.

        A rank without media gets one of the smallest size, all zeros: all ranks run the tower.

        Returns:
            what `for_batch` needs; None: there are fewer than two media, and every rank encodes what there is.
        """
        key = next((key for key in self._input_keys if batch.get(key) is not None), None)
        if key is None:
            return None
        media, grid_key = batch[key], self._split.grids.get(key)
        grid = None if grid_key is None else batch[grid_key]
        rows = [1] * len(media) if grid is None else grid.prod(-1).tolist()
        if len(rows) < 2:
            return None
        parts = balanced_parts(rows, self._ranks.size)
        own = parts[self._ranks.rank]
        sizes = [sum(rows[number] for number in part) // self._rows_per_token for part in parts]
        if own:
            start = sum(rows[: own.start])
            batch[key] = media[start : start + sum(rows[number] for number in own)].clone()  # frees those of others
            grid = None if grid is None else grid[own.start : own.stop]
        else:
            side = round(self._rows_per_token**0.5)
            batch[key] = torch.zeros_like(media[: 1 if grid is None else self._rows_per_token])
            grid = None if grid is None else grid.new_tensor([[1, side, side]])
        return MediaShard(sizes, grid)

    def for_batch(self, shard: MediaShard | None) -> None:
        """Set what `cut` has returned of the next forward pass's micro-batch; None: nothing is split."""
        self._shard = shard

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        shard = self._shard
        if shard is None:
            return self._forward(*args, **kwargs)
        if shard.grid is not None:
            kwargs["grid_thw"] = shard.grid
        output = self._forward(*args, **kwargs)
        gathered = {name: self._gather(output[name], shard) for name in self._split.outputs}
        return type(output)(**gathered)

    def _gather(self, value: Any, shard: MediaShard) -> Any:
        if isinstance(value, torch.Tensor):
            return gather_rows(value, shard.sizes, self._ranks)
        return [gather_rows(part, shard.sizes, self._ranks) for part in value]


def balanced_parts(costs: Sequence[int], ranks: int) -> list[range]:
    """Cut a list into contiguous parts of about equal sums; parts may be empty.

    An item belongs to the part in which its middle is.

    Args:
        costs: of each item, in order.
        ranks: number of parts.
    """
    total, before = sum(costs), 0
    part_of = []
    for cost in costs:
        part_of.append(min(ranks - 1, (2 * before + cost) * ranks // (2 * total)))
        before += cost
    bounds = [sum(part < rank for part in part_of) for rank in range(ranks + 1)]
    return [range(start, stop) for start, stop in pairwise(bounds)]
