"""Which data adapter a model takes: its family folder's own, or the default one."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

from mindspeed_mm.configs.model_config import settled_model_id
from mindspeed_mm.data.adapter import DataAdapter, DefaultAdapter

_PACKAGE = "mindspeed_mm.models.transformers"


def find_adapter(model_config: Any) -> DataAdapter:
    """Return `ADAPTER` of the module `data` in the family's folder, where there is one; else the default adapter.

    Args:
        model_config: model.json's content: `model_id`, or what config.json in `init_from_hf_path` calls its model_type,
            names the family.
    """
    for family in _names(model_config):
        if family.isidentifier() and importlib.util.find_spec(f"{_PACKAGE}.{family}") is not None:
            module = f"{_PACKAGE}.{family}.data"
            if importlib.util.find_spec(module) is not None:
                return importlib.import_module(module).ADAPTER
            break
    return DefaultAdapter()


def _names(model_config: Any) -> list[str]:
    path = getattr(model_config, "init_from_hf_path", None)
    model_type = None
    with contextlib.suppress(OSError, ValueError, AttributeError):  # the model says what is wrong with it
        model_type = json.loads(Path(str(path), "config.json").read_text(encoding="utf-8")).get("model_type")
    names = [settled_model_id(getattr(model_config, "model_id", None), model_type), model_type]
    return [name for name in names if isinstance(name, str)]
