"""Choice of a model's data adapter: its family's own, or the default one."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from mindspeed_mm.configs.model_config import read_plugins, settled_model_id
from mindspeed_mm.configs.plugins import import_plugins
from mindspeed_mm.data.adapter import DataAdapter, DefaultAdapter
from mindspeed_mm.models.common.families import find_family


def find_adapter(model_config: Any) -> DataAdapter:
    """Return the adapter of the model's family, or the default one if it has none of its own.

    Args:
        model_config: model.json's content. `model_id`, or the model_type in config.json of `init_from_hf_path`, names
            the family; a `plugin` may register it.
    """
    import_plugins(read_plugins(getattr(model_config, "plugin", None) or []))
    for name in _names(model_config):
        family = find_family(name)
        if family is not None and family.data_adapter is not None:
            return family.data_adapter
    return DefaultAdapter()


def _names(model_config: Any) -> list[str]:
    path = getattr(model_config, "init_from_hf_path", None)
    model_type = None
    with contextlib.suppress(OSError, ValueError, AttributeError):  # loading the model reports the error
        model_type = json.loads(Path(str(path), "config.json").read_text(encoding="utf-8")).get("model_type")
    names = [settled_model_id(getattr(model_config, "model_id", None), model_type), model_type]
    return [name for name in names if isinstance(name, str)]
