"""A model's word against packed rows before anything is trained."""

from __future__ import annotations

from torch import nn

from mindspeed_mm.configs.run_sections import Batch
from mindspeed_mm.models.contract import as_trainable


def check_packing(model: nn.Module, batch: Batch) -> None:
    """Let a model that has `check_packing` refuse the packed rows that data.json or a flag asks for.

    Raises:
        ConfigError: what the model reports.
    """
    if batch.packs:
        as_trainable(model).check_packing()
