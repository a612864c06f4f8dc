"""Data adapter of DeepSeek-VL with two towers: each image is given in two resolutions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mindspeed_mm.models.transformers.deepseek_vl.data import FixedTokensAdapter


class TwoResolutionsAdapter(FixedTokensAdapter):
    """Adds the image in high resolution to the fields of DeepSeek-VL."""

    media_keys: Mapping[str, Sequence[str]] = {"image": ("pixel_values", "high_res_pixel_values")}


ADAPTER = TwoResolutionsAdapter()
