"""config.json of an export: what a model was built from, and the dtypes that its weights are written in."""

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
    """Write what a model that is none of transformers' was built from (its `config`), if JSON can hold it."""
    config = as_trainable(model).config
    if is_diffusers_class(type(model)):
        described: Any = model
        # made by diffusers for the class as it is now, which may be one that fully_shard derived
        config = {**json.loads(described.to_json_string()), "_class_name": type_without_fsdp(model).__name__}
    content = config.to_dict() if config is not None and hasattr(config, "to_dict") else config
    if isinstance(content, Mapping):
        with contextlib.suppress(TypeError, ValueError):
            (working / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def state_dtypes(config: Any, source: str | None, dtype: torch.dtype | None, main: torch.dtype) -> None:
    """Let a config name `dtype`, or what the source's names (training has its own), or what most values have."""
    path = Path(source) / "config.json" if source is not None else None
    said = json.loads(path.read_text(encoding="utf-8")) if path is not None and path.is_file() else {}
    of_source = said.get("dtype", said.get("torch_dtype"))
    of_whole = str(dtype).removeprefix("torch.") if dtype is not None else of_source
    config.dtype = of_whole or str(main).removeprefix("torch.")
    for part in config.sub_configs:
        inner = getattr(config, part, None)
        if inner is not None:
            of_part = said.get(part) or {} if of_whole == of_source else {}
            inner.dtype = of_part.get("dtype", of_part.get("torch_dtype"))


def with_dtype(said: Any, name: str) -> Any:
    """A configuration's JSON, every dtype in it replaced."""
    if isinstance(said, list):
        return [with_dtype(value, name) for value in said]
    if not isinstance(said, dict):
        return said
    return {key: name if key in ("dtype", "torch_dtype") else with_dtype(value, name) for key, value in said.items()}
