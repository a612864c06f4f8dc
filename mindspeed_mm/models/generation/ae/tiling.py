"""Tiled encoding: one set of sizes in pixels for autoencoders that each name theirs differently."""

from __future__ import annotations

import inspect
from fractions import Fraction
from typing import Any

from mindspeed_mm.configs.sora_config import TilingParam
from mindspeed_mm.utils.errors import ConfigError

_SIDES = ("height", "width")


def enable_tiling(model: Any, sizes: TilingParam, spatial_stride: int, where: str) -> None:
    """Let a diffusers autoencoder work tile by tile.

    Some take the distance from one tile to the next, others the share of a tile that overlaps (1 - distance / size),
    and some of these have square tiles.

    Args:
        model: the autoencoder.
        sizes: in pixels; those that are absent stay as the class has them.
        spatial_stride: pixels that a latent stands for.
        where: file and key, for messages.

    Raises:
        ConfigError: it can't be tiled, or not like this.
    """
    name = type(model).__name__
    if not hasattr(model, "enable_tiling"):
        raise ConfigError(f"{where}.enable_tiling: {name} can't be tiled; write false")
    given = {key: value for key, value in sizes.model_dump().items() if value is not None}
    for key, value in given.items():
        if value % spatial_stride:
            raise ConfigError(
                f"{where}.tiling_param.{key} is {value}; expected a multiple of {spatial_stride}, a latent's pixels in "
                f"{name}"
            )
    takes = inspect.signature(model.enable_tiling).parameters
    if "tile_sample_stride_height" in takes:
        model.enable_tiling(**given)
        return
    mins = {side: given.get(f"tile_sample_min_{side}") for side in _SIDES}
    if hasattr(model, "tile_sample_min_size"):
        model.enable_tiling()
        size = _same(mins, name, where)
        if size is not None:
            model.tile_sample_min_size, model.tile_latent_min_size = size, size // spatial_stride
        sizes_now = dict.fromkeys(_SIDES, model.tile_sample_min_size)
    else:
        settings = {f"tile_sample_min_{side}": size for side, size in mins.items()}
        if "tile_latent_min_height" in takes:
            settings |= {f"tile_latent_min_{side}": size // spatial_stride for side, size in mins.items() if size}
        model.enable_tiling(**settings)
        sizes_now = {side: getattr(model, f"tile_sample_min_{side}") for side in _SIDES}
    shares = {side: _overlap(given.get(f"tile_sample_stride_{side}"), side, sizes_now[side], where) for side in _SIDES}
    if hasattr(model, "tile_overlap_factor"):
        share = _same(shares, name, where)
        if share is not None:
            model.tile_overlap_factor = share
    else:
        for side, share in shares.items():
            if share is not None:
                setattr(model, f"tile_overlap_factor_{side}", share)


def _overlap(stride: int | None, side: str, size: int, where: str) -> Fraction | None:
    """Return a tile's overlapping share, exact: the class rounds products with it down to whole pixels and latents."""
    if stride is None:
        return None
    if stride > size:
        raise ConfigError(
            f"{where}.tiling_param.tile_sample_stride_{side} is {stride}, and a tile's {side} {size}; expected less"
        )
    return 1 - Fraction(stride, size)


def _same(values: dict[str, Any], name: str, where: str) -> Any:
    """Return the one value for both sides; None if neither has one."""
    height, width = values.values()
    if None not in (height, width) and height != width:
        raise ConfigError(
            f"{where}.tiling_param: {name} has one overlap for both sides; expected the same for height and width, "
            f"found {height} and {width}"
        )
    return width if height is None else height
