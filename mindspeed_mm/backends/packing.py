"""The check that a model supports packed rows, before training starts."""

from __future__ import annotations

from torch import nn

from mindspeed_mm.configs.run_sections import Batch
from mindspeed_mm.models.contract import as_trainable


def check_packing(model: nn.Module, batch: Batch) -> None:
    """Call the model's `check_packing`, if it has one, when data.json or a flag requests packed rows.

    Raises:
        ConfigError: the model does not support packed rows.
    """
    if batch.packs:
        as_trainable(model).check_packing()
