"""The pipeline around a trained model, for exports that load as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INDEX = "model_index.json"


@dataclass(frozen=True)
class PipelineLayout:
    """A pipeline of diffusers around a trained model.

    A model handed to a backend may have a method `export_layout() -> PipelineLayout | None`; its final export is then
    the whole pipeline's directory.

    Attributes:
        component: folder of the trained model in it ("transformer").
        others: folder of each other part → the directory that it is copied from.
        model_index: content of model_index.json.
    """

    component: str
    others: Mapping[str, Path]
    model_index: Mapping[str, Any]
