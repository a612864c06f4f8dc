"""Rows of DeepSeek-VL with two towers: each picture in two resolutions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mindspeed_mm.models.transformers.deepseek_vl.data import FixedTokensAdapter


class TwoResolutionsAdapter(FixedTokensAdapter):
    """As with one tower, and the picture in high resolution beside it."""

    media_keys: Mapping[str, Sequence[str]] = {"image": ("pixel_values", "high_res_pixel_values")}


ADAPTER = TwoResolutionsAdapter()
