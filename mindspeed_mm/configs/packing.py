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
    basic, attr = (part if isinstance(part, dict) else {} for part in map(param.get, ("basic_parameters", "attr")))
    return any(_is_true(part.get(name)) for part in (basic, attr) for name in ("packing", "neat_packing"))


def _is_true(value: object) -> bool:
    try:
        return read_bool(value)
    except ValueError:
        return False
