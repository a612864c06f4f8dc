"""Adapted families, each as a tiny real directory: what `tests/parity/test_families.py` holds to plain transformers.

One module a family, named like its folder in `mindspeed_mm/models/transformers`; its `FAMILY` is found by itself.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Family:
    """A family under test.

    Attributes:
        make: (folder) → a Hugging Face directory in it: config, random float32 weights (every weight different from
            zero and one), tokenizer and, if it has media, the processor; small, but real in every other respect.
        wrap: what its published fsdp2.yaml wraps, in today's module names.
        kinds: media of its rows ("image", "video", "audio").
        clip_frames: numbers of frames of its videos; one where its processor can't take others in one row.
        packs: whether it trains on packed rows.
        model: keys of model.json beside `init_from_hf_path`.
        preprocess: keys of data.json's preprocess_parameters.
        published: name of a published size → (config of that size, parameters that it has as its authors count them).
        flags: flags of the run.
        rows: (folder of the media that `write_rows` made) → eight rows of the data file, where the usual ones don't do.
        whole: (processor, messages as a chat template takes them, kind → decoded media) → what the processor makes of a
            row, where it isn't by a chat template or with the usual arguments.
        outputs: (model, inputs of one row) → logits [n, vocabulary] and the labels [n] that they are to predict, where
            they aren't those of a causal model.
    """

    make: Callable[[Path], Path]
    wrap: tuple[str, ...]
    kinds: tuple[str, ...] = ()
    clip_frames: tuple[int, ...] = (2, 4)
    packs: bool = True
    model: Mapping[str, Any] = field(default_factory=dict)
    preprocess: Mapping[str, Any] = field(default_factory=dict)
    published: Mapping[str, tuple[Callable[[], Any], int]] = field(default_factory=dict)
    flags: Mapping[str, Any] = field(default_factory=dict)
    rows: Callable[[Path], list[dict[str, Any]]] | None = None
    whole: Callable[[Any, list[Any], Mapping[str, list[Any]]], Mapping[str, Any]] | None = None
    outputs: Callable[[Any, Mapping[str, Any]], tuple[Any, Any]] | None = None


def families() -> dict[str, Family]:
    """All families, by name."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return {name: importlib.import_module(f"{__name__}.{name}").FAMILY for name in names}


def padded_vocabulary(tokenizer: Any) -> int:
    """Number of rows of an embedding that four tensor-parallel ranks can share; published models pad theirs, too."""
    return -(-len(tokenizer) // 4) * 4


def randomize(model: Any, seed: int = 0) -> Any:
    """Give every parameter random values of the size that they have after initialisation, and no two alike."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            around = 1.0 if parameter.dim() <= 1 and parameter.numel() and parameter.mean() > 0.5 else 0.0
            parameter.copy_(around + 0.05 * torch.randn(parameter.shape, generator=generator))
    return model
