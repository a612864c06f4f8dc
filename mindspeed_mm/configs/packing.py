"""Whether data.json packs rows."""

from __future__ import annotations

from mindspeed_mm.configs.scalars import read_bool
from mindspeed_mm.configs.sections import plain


def asks_for_packing(data: object) -> bool:
    """Whether data.json's content packs rows; that of a script with its own data may be anything."""
    param = plain(data)
    param = param.get("dataset_param") if isinstance(param, dict) else None
    if not isinstance(param, dict):
        return False
    parts = (part for part in map(param.get, ("basic_parameters", "attr", "corpus")) if isinstance(part, dict))
    keys = ("packing", "neat_packing", "reset_attention_mask")
    return any(_is_true(part.get(key)) for part in parts for key in keys)


def _is_true(value: object) -> bool:
    try:
        return read_bool(value)
    except ValueError:
        return False
