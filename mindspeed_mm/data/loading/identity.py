"""Names for what is computed from the rows of a data set: hashes of everything that determines it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from mindspeed_mm.configs.data_config import DatasetParam
from mindspeed_mm.data.adapter import DataAdapter
from mindspeed_mm.data.sources.files import RowSource


def stamp(path: str | Path) -> list[Any]:
    """Identify the present version of a file: its path, its bytes and when it was written."""
    file = Path(path).absolute()
    status = file.stat()
    return [str(file), status.st_size, status.st_mtime_ns]


def hash_of(settings: Any) -> str:
    """Return a hash of settings, 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:16]


def row_settings(
    source: RowSource,
    param: DatasetParam,
    max_length: int | None,
    adapter: DataAdapter,
    without: Collection[str] = (),
) -> dict[str, Any]:
    """Return what determines the ids and labels of rows: the rows, settings, the processor's files, the length limit.

    Args:
        source: The rows.
        param: `dataset_param`.
        max_length: Longest sample in tokens.
        adapter: The model family.
        without: Keys of `basic_parameters` that don't count.
    """
    model = Path(param.preprocess_parameters.model_name_or_path)
    return {
        "rows": [stamp(file.path) for file in source.files],
        "offsets": source.offsets.tolist(),
        "entries": [repr(entry) for entry in source.entries],
        "basic": {k: v for k, v in param.basic_parameters.model_dump().items() if k not in without},
        "preprocess": param.preprocess_parameters.model_dump(),
        "processor": [stamp(file) for file in sorted(model.glob("*")) if file.suffix in (".json", ".jinja", ".model")],
        "max_length": max_length,
        "adapter": type(adapter).__qualname__,
    }
