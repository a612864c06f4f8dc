"""Preparation of Qwen2.5-VL's micro-batches on the host: position ids of packed rows, media for one tower pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mindspeed_mm.models.common.packed import Unpacked, restarting_positions
from mindspeed_mm.utils.errors import DataError

_GRIDS = ("image_grid_thw", "video_grid_thw")


def packed_positions(model: Any, batch: Mapping[str, Any], documents: torch.Tensor) -> torch.Tensor:
    """Return each token's position in its sample, then time, height and width as transformers computes them per sample.

    Args:
        model: the transformers model; its weights aren't needed.
        batch: input_ids and mm_token_type_ids [batch, sequence], grids and second_per_grid_ts in the samples' order.
        documents: [batch, sequence] int64.

    Returns:
        [4, batch, sequence] int64.

    Raises:
        DataError: media without mm_token_type_ids, or fewer media than the tokens require.
    """
    text = restarting_positions(documents)
    grids = {name: batch.get(name) for name in _GRIDS}
    if all(grid is None for grid in grids.values()):
        return text.expand(4, *text.shape)
    if batch.get("mm_token_type_ids") is None:
        raise DataError("a packed micro-batch has media but no 'mm_token_type_ids', which say where they are")
    samples = Unpacked(documents)
    try:
        positions, _ = model.model.get_rope_index(
            samples.take_apart(batch["input_ids"]),
            samples.take_apart(batch["mm_token_type_ids"]),
            **grids,
            second_per_grid_ts=batch.get("second_per_grid_ts"),
            attention_mask=samples.mask,
        )
    except (StopIteration, TypeError, RuntimeError) as error:
        found = {name: None if grid is None else grid.tolist() for name, grid in grids.items()}
        raise DataError(
            f"the media of a packed micro-batch ({found}) don't fit its media tokens, sample by sample: {error}"
        ) from error
    return torch.cat([text.unsqueeze(0), samples.put_back(positions)])


def grid_positions(model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    """Return the positions of a micro-batch in time, height and width, as the transformers model computes them itself.

    Args:
        model: the transformers model; its weights aren't needed.
        batch: input_ids, attention_mask, mm_token_type_ids [batch, sequence], grids and second_per_grid_ts.

    Returns:
        [3, batch, sequence] int64, or `position_ids` if the batch has them.
    """
    if batch.get("position_ids") is not None:
        return batch["position_ids"]
    rows, length = batch["input_ids"].shape
    if all(batch.get(name) is None for name in _GRIDS):
        return torch.arange(length).expand(3, rows, length)
    names = ("input_ids", *_GRIDS, "attention_mask", "second_per_grid_ts", "mm_token_type_ids")
    return model.model.get_rope_index(**{name: batch.get(name) for name in names})[0]


def require_types(batch: Mapping[str, Any]) -> None:
    """Refuse media whose tokens can't be distinguished: transformers would give them the positions of text.

    Args:
        batch: a micro-batch; with `position_ids` it needs no `mm_token_type_ids`.

    Raises:
        DataError: there are media, and neither of the two.
    """
    found = [name for name in _GRIDS if batch.get(name) is not None]
    if found and batch.get("position_ids") is None and batch.get("mm_token_type_ids") is None:
        raise DataError(
            f"a micro-batch has media ({', '.join(found)}) but no 'mm_token_type_ids', which say where they are: their "
            "positions would be those of a text; let the batch hold it [batch, sequence], 1 for tokens of images, 2 of "
            "videos, 0 for others, or its 'position_ids'"
        )


def one_tower_pass(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Merge images and videos of a micro-batch for one pass of the vision tower.

    transformers runs the tower once for images and once for videos. A rank with both would gather and reduce the
    tower's shards twice, while a rank with images only does so once and waits in another collective. So videos are
    passed as images, in the order of their tokens; position ids are computed before, for every micro-batch.

    Args:
        model: the transformers model; its weights aren't needed.
        batch: input_ids, mm_token_type_ids, media; `position_ids` if they are known already.

    Returns:
        the micro-batch with position ids, without videos if it has both modalities.

    Raises:
        DataError: a number of media tokens that doesn't match the grids, or no mm_token_type_ids.
    """
    require_types(batch)
    batch, config = {**batch, "position_ids": grid_positions(model, batch)}, model.config
    if batch.get("pixel_values") is None or batch.get("pixel_values_videos") is None:
        return batch
    ids, starts, patches, grids = batch["input_ids"], [], [], []
    for token, grid_name, pixels in (
        (config.image_token_id, "image_grid_thw", "pixel_values"),
        (config.video_token_id, "video_grid_thw", "pixel_values_videos"),
    ):
        grid = batch.pop(grid_name)
        sizes = grid.prod(1)
        ends = (sizes // config.vision_config.spatial_merge_size**2).cumsum(0)
        places = (ids == token).flatten().nonzero().squeeze(1)
        if len(places) != int(ends[-1]):
            raise DataError(
                f"a micro-batch has {len(places)} tokens {token} for {int(ends[-1])} merged patches ({grid_name}); "
                "media and placeholders of its rows don't belong together"
            )
        starts.append(places[torch.cat([ends.new_zeros(1), ends[:-1]])])
        patches += batch.pop(pixels).split(sizes.tolist())
        grids.append(grid)
    order = torch.cat(starts).argsort()
    batch["pixel_values"] = torch.cat([patches[number] for number in order.tolist()])
    batch["image_grid_thw"] = torch.cat(grids)[order]
    batch["input_ids"] = ids.masked_fill(ids == config.video_token_id, config.image_token_id)
    return batch
