"""config.json of an export: the configuration of the model, and the dtypes of its written weights."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mindspeed_mm.models.common.diffusers_init import is_diffusers_class
from mindspeed_mm.models.contract import as_trainable
from mindspeed_mm.models.transformers.meta_model import type_without_fsdp


def write_own_config(model: nn.Module, working: Path) -> None:
    """Write the `config` of a model that is no transformers model, if it can be written as JSON."""
    config = as_trainable(model).config
    if is_diffusers_class(type(model)):
        described: Any = model
        # diffusers writes the name of the current class, which may be the one that fully_shard derived
        config = {**json.loads(described.to_json_string()), "_class_name": type_without_fsdp(model).__name__}
    content = config.to_dict() if config is not None and hasattr(config, "to_dict") else config
    if isinstance(content, Mapping):
        with contextlib.suppress(TypeError, ValueError):
            (working / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def set_config_dtypes(config: Any, source: str | None, dtype: torch.dtype | None, main: torch.dtype) -> None:
    """Set the dtypes of a config to those of the written weights instead of those of training.

    Args:
        config: a transformers configuration; changed in place.
        source: HF directory that the model was built from.
        dtype: dtype of the written weights; None: the one in the source's config.json.
        main: dtype of most values, for a source without a dtype.
    """
    path = Path(source) / "config.json" if source is not None else None
    content = json.loads(path.read_text(encoding="utf-8")) if path is not None and path.is_file() else {}
    of_source = content.get("dtype", content.get("torch_dtype"))
    of_whole = str(dtype).removeprefix("torch.") if dtype is not None else of_source
    config.dtype = of_whole or str(main).removeprefix("torch.")
    for part in config.sub_configs:
        inner = getattr(config, part, None)
        if inner is not None:
            of_part = content.get(part) or {} if of_whole == of_source else {}
            inner.dtype = of_part.get("dtype", of_part.get("torch_dtype"))


def with_dtype(content: Any, name: str) -> Any:
    """Return the JSON content of a configuration with every dtype replaced."""
    if isinstance(content, list):
        return [with_dtype(value, name) for value in content]
    if not isinstance(content, dict):
        return content
    return {key: name if key in ("dtype", "torch_dtype") else with_dtype(value, name) for key, value in content.items()}
