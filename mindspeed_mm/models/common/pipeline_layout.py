"""The diffusers pipeline around a trained model, for exports that are complete pipelines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INDEX = "model_index.json"


@dataclass(frozen=True)
class PipelineLayout:
    """A diffusers pipeline around a trained model.

    A trained model may have a method `export_layout() -> PipelineLayout | None`; its final export is then the directory
    of the whole pipeline.

    Attributes:
        component: folder of the trained model in the pipeline ("transformer").
        others: folder of each other part → the directory that the part is copied from.
        model_index: content of model_index.json.
    """

    component: str
    others: Mapping[str, Path]
    model_index: Mapping[str, Any]
