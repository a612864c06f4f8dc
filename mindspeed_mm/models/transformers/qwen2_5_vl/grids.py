"""What towers of Qwen-VL's kind compute from grids of images and videos, computed on the host before the forward pass.

`Tower.grid_inputs`: (vision configuration, grid [media, 3] int64: time, height and width in patches) → arguments of the
tower, by the names that `transformers.vision_utils` takes them out of its keyword arguments by.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.utils.generic import is_flash_attention_requested
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from mindspeed_mm.utils.device import OnHost, host_value, move_to_device

GridInputs = Callable[[Any, torch.Tensor], dict[str, Any]]


def axial_inputs(vision: Any, grid: torch.Tensor) -> dict[str, Any]:
    """Return the rows and columns of patches, and the lengths of frames (Qwen2-VL)."""
    positions = get_vision_position_ids(grid, vision.spatial_merge_size)
    return {"position_ids": positions, **_lengths(vision, "seqlen", get_vision_cu_seqlens(grid))}


def window_inputs(vision: Any, grid: torch.Tensor) -> dict[str, Any]:
    """Return these, and the order of patches by windows with the windows' lengths (Qwen2.5-VL)."""
    index, lengths = get_vision_window_index(grid, vision.spatial_merge_size, vision.window_size, vision.patch_size)
    return {**axial_inputs(vision, grid), "window_index": index, **_lengths(vision, "window_seqlen", lengths)}


def interpolated_inputs(vision: Any, grid: torch.Tensor) -> dict[str, Any]:
    """Return these of Qwen2-VL, and where patches are in the table of positions (Qwen3-VL)."""
    indices, weights = get_vision_interpolation_indices_and_weights(
        grid,
        num_grid_per_side=int(vision.num_position_embeddings**0.5),
        mode="bilinear",
        align_corners=True,
        spatial_merge_size=vision.spatial_merge_size,
    )
    return {**axial_inputs(vision, grid), "interp_indices": indices, "interp_weights": weights}


def device_inputs(vision: Any, grid: torch.Tensor) -> dict[str, Any]:
    """Return the rows and columns of patches, the lengths of frames and the grid, all for the device (GLM-4.1V)."""
    positions = get_vision_position_ids(grid, vision.spatial_merge_size)
    return {"position_ids": positions, "cu_seqlens": get_vision_cu_seqlens(grid), "grid_thw": grid}


def smallest_grid(grid_inputs: GridInputs, vision: Any, device: torch.device) -> dict[str, Any]:
    """Return the arguments of a tower for one image of one merged patch.

    Args:
        grid_inputs: the tower's.
        vision: its configuration.
        device: of the tower.
    """
    side = vision.spatial_merge_size
    grid = torch.tensor([[1, side, side]])
    inputs = move_to_device(grid_inputs(vision, grid), device)
    return {"grid_thw": grid, **{name: host_value(value) for name, value in inputs.items()}}


def _lengths(vision: Any, name: str, cumulative: torch.Tensor) -> dict[str, Any]:
    """Flash attention takes lengths on the device and the longest on the host; other attention splits by them there."""
    if is_flash_attention_requested(vision):
        return {f"cu_{name}s": cumulative, f"max_{name}": int(cumulative.diff().max())}
    return {f"cu_{name}s": OnHost(cumulative)}
