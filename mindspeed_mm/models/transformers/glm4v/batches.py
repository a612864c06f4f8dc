"""Merging the images and videos of a GLM-4.1V micro-batch into one sequence of images, in token order."""

from __future__ import annotations

from typing import Any

import torch

from mindspeed_mm.models.transformers.qwen2_5_vl import batches as qwen2_5_vl
from mindspeed_mm.utils.errors import DataError


def glm4v_tower_pass(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Pass the frames of videos as images, which have the same token; position ids are computed before.

    transformers counts every image token for both modalities, and thus fails for a micro-batch with both.

    Args:
        model: the transformers model; its weights aren't needed.
        batch: input_ids, mm_token_type_ids, media; `position_ids` if they are known already.

    Returns:
        the micro-batch without videos.

    Raises:
        DataError: media without mm_token_type_ids, or a number of media tokens that doesn't match the grids.
    """
    qwen2_5_vl.require_types(batch)
    batch = {**batch, "position_ids": qwen2_5_vl.grid_positions(model, batch)}
    if batch.get("pixel_values_videos") is None:
        return batch
    types = batch.get("mm_token_type_ids")
    if types is None:
        raise DataError("a micro-batch has videos but no 'mm_token_type_ids', which mark their tokens")
    grids = batch["video_grid_thw"]
    frames = grids.repeat_interleave(grids[:, 0], dim=0)
    frames[:, 0] = 1
    if batch.get("pixel_values") is None:
        del batch["video_grid_thw"]
        batch["pixel_values"], batch["image_grid_thw"] = batch.pop("pixel_values_videos"), frames
        return batch
    # while media are put in order, video tokens have the configuration's own id for them
    batch["input_ids"] = torch.where(types == 2, model.config.video_token_id, batch["input_ids"])
    return qwen2_5_vl.one_tower_pass(model, {**batch, "video_grid_thw": frames})
