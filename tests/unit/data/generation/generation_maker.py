"""Annotation files and data sets for the tests of generation data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindspeed_mm.configs.generation_data import GenerationDataConfig
from mindspeed_mm.data.generation.build import build_generation_datasets
from mindspeed_mm.data.generation.dataset import ShapedDataset
from mindspeed_mm.data.generation.rule import GenerationRule

#: of an autoencoder that makes a latent frame of 4 and a token of 16 × 16 pixels
RULE = GenerationRule(temporal_stride=4, spatial_multiple=16, text_dropout=0.0, seed=7, made_by="an autoencoder")


def described(path: Path | str, kind: str = "t2v", loader: Any = None, **keys: Any) -> dict[str, Any]:
    """The content of a data.json; keys of basic_parameters begin with `basic_`, the others are of preprocessing."""
    basic = {name.removeprefix("basic_"): value for name, value in keys.items() if name.startswith("basic_")}
    preprocess = {name: value for name, value in keys.items() if not name.startswith("basic_")}
    return {
        "dataset_param": {
            "dataset_type": kind,
            "basic_parameters": {"data_path": str(path), **basic},
            "preprocess_parameters": {"max_height": 32, "max_width": 64, "num_frames": 9, **preprocess},
        },
        "dataloader_param": loader or {},
    }


def config(path: Path | str, kind: str = "t2v", **keys: Any) -> GenerationDataConfig:
    """The same, typed."""
    return GenerationDataConfig.from_dict(described(path, kind, **keys))


def opened(path: Path | str, kind: str = "t2v", rule: GenerationRule = RULE, **keys: Any) -> ShapedDataset:
    """The training data set."""
    return build_generation_datasets(config(path, kind, **keys), rule)[0]


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write rows as json."""
    path.write_text(json.dumps(list(rows), ensure_ascii=False), encoding="utf-8")
    return path
