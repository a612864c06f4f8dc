"""A model's word against packed rows before anything is trained."""

from __future__ import annotations

from typing import Any

from mindspeed_mm.configs.run_sections import Batch


def check_packing(model: Any, batch: Batch) -> None:
    """Let a model that has `check_packing` refuse the packed rows that data.json or a flag asks for.

    Raises:
        ConfigError: what the model reports.
    """
    if batch.packs and hasattr(model, "check_packing"):
        model.check_packing()
