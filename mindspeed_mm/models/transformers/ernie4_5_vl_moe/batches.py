"""Preparation of ERNIE 4.5 VL's micro-batches on the host: which tokens go to the experts of images and videos."""

from __future__ import annotations

from typing import Any

import torch

from mindspeed_mm.models.transformers.qwen2_5_vl.batches import require_types

_TOKENS = ("start_token_id", "token_id", "end_token_id")


def prepare_batch(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Mark the tokens of images and videos and those around them, and compute the positions of rows with media.

    Args:
        model: the transformers model; its weights aren't needed.
        batch: input_ids, mm_token_type_ids, media; `position_ids` if they are known already.

    Returns:
        the micro-batch with `moe_mm_token_type_ids` [batch, sequence] bool, as the processor marks them for a row.

    Raises:
        DataError: media without mm_token_type_ids.
    """
    require_types(batch)
    config, ids = model.config, batch["input_ids"]
    theirs = [getattr(config, f"{kind}_{name}") for kind in ("image", "video") for name in _TOKENS]
    batch = {**batch, "moe_mm_token_type_ids": torch.isin(ids, torch.tensor(theirs))}
    grids = {name: batch.get(name) for name in ("image_grid_thw", "video_grid_thw")}
    if batch.get("position_ids") is None and any(grid is not None for grid in grids.values()):
        types, mask = batch["mm_token_type_ids"], batch.get("attention_mask")
        batch["position_ids"], _ = model.model.get_rope_index(ids, types, **grids, attention_mask=mask)
    return batch
