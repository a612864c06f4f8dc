"""First values of adapters for Megatron-core chunks, under transformers' and PEFT's names, for any layout."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mindspeed_mm.checkpoint.adapters import read_adapters
from mindspeed_mm.checkpoint.lazy import Node, Region, leaf
from mindspeed_mm.checkpoint.tensors import trained_tensors
from mindspeed_mm.configs.lora import LoraOptions
from mindspeed_mm.models.common.adapters import draw_adapter
from mindspeed_mm.utils.adapter_names import is_adapter

_MAGNITUDE = ".lora_magnitude_vector"


def first_adapters(
    meta_model: Any, options: LoraOptions, seed: int, base: Mapping[str, Node], dtype: torch.dtype
) -> dict[str, Node]:
    """Return the values of adapters before training, by name; they equal those of `draw_adapters`.

    With --lora-load they are the directory's, and so are the values of what is trained whole.

    Args:
        meta_model: the transformers model with its adapters, on the meta device.
        options: the run's.
        seed: the run's.
        base: values of the model's weights, of which DoRA's magnitudes are the norms.
        dtype: dtype in which the weights are stored.

    Raises:
        CheckpointError, ConfigError: see `read_adapters`.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in trained_tensors(meta_model).items()}
    if options.start is not None:
        stored, _ = read_adapters(meta_model, Path(options.start), options)
        return {name: stored[name].node for name in shapes}

    drawing = threading.Lock()

    def draw(name: str, region: Region) -> torch.Tensor:
        if name.endswith(_MAGNITUDE):
            weight = base[name.removesuffix(_MAGNITUDE) + ".weight"]
            rows = weight.read((*region, (0, weight.shape[1])))
            return rows.to(dtype).float().norm(dim=1)
        with drawing:  # values are read by several threads, which share one random state
            value = draw_adapter(name, shapes[name], options, seed)
        for dim, (start, length) in enumerate(region):
            value = value.narrow(dim, start, length)
        return value

    return {name: leaf(name, shapes[name], torch.float32, draw).node for name in shapes if is_adapter(name)}
