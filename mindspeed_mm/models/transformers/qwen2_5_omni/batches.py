"""Preparation of Omni models' micro-batches on the host: position ids, and media for one pass of each tower."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mindspeed_mm.models.common.packed import Unpacked, restarting_positions
from mindspeed_mm.models.transformers.qwen2_5_vl.batches import one_tower_pass as merge_images_and_videos
from mindspeed_mm.utils.errors import DataError

_GRIDS = ("image_grid_thw", "video_grid_thw")


def omni_packed_positions(model: Any, batch: Mapping[str, Any], documents: torch.Tensor) -> torch.Tensor:
    """Return each token's position in its sample, then time, height and width as transformers computes them per sample.

    Args:
        model: the transformers model; its weights aren't needed.
        batch: input_ids [batch, sequence]; grids, video_second_per_grid and feature_attention_mask in the samples'
            order.
        documents: [batch, sequence] int64.

    Returns:
        [4, batch, sequence] int64, or float32 if there are fractional times.

    Raises:
        DataError: the media don't match the media tokens.
    """
    text = restarting_positions(documents)
    if all(batch.get(name) is None for name in _GRIDS):
        return text.expand(4, *text.shape)
    samples = Unpacked(documents)
    positions = _positions(model, batch, samples.take_apart(batch["input_ids"]), samples.mask)
    return torch.cat([text.unsqueeze(0), samples.put_back(positions)])


def omni_tower_pass(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Merge images and videos of a micro-batch for one pass of the vision tower.

    Position ids are computed before, from the original tokens. They are computed for every batch, because here, on the
    host, they need no synchronisation with the device.

    Args:
        model: the transformers model; its weights aren't needed.
        batch: input_ids, attention_mask, media; `position_ids` if they are known already.

    Raises:
        DataError: the media don't match the media tokens.
    """
    if batch.get("position_ids") is None:
        mask = batch.get("attention_mask")
        mask = torch.ones_like(batch["input_ids"]) if mask is None else mask
        batch = {**batch, "position_ids": _positions(model, batch, batch["input_ids"], mask)}
    return merge_images_and_videos(model, batch)


def _positions(model: Any, batch: Mapping[str, Any], ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return time, height and width [3, rows, longest], as int64 if all are whole numbers."""
    heard = batch.get("feature_attention_mask")
    try:
        positions, _ = model.model.get_rope_index(
            ids,
            *(batch.get(name) for name in _GRIDS),
            mask,
            audio_seqlens=None if heard is None else heard.sum(1),
            second_per_grids=batch.get("video_second_per_grid"),
        )
    except (IndexError, TypeError, ValueError, RuntimeError) as error:
        found = {name: None if batch.get(name) is None else batch[name].tolist() for name in _GRIDS}
        sounds = 0 if heard is None else len(heard)
        raise DataError(
            f"the media of a micro-batch ({found}, {sounds} sounds) don't fit its media tokens, row by row: {error}"
        ) from error
    whole = positions.long()
    return whole if torch.equal(whole.to(positions.dtype), positions) else positions
