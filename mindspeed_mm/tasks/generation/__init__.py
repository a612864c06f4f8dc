"""Generation of images and videos with a trained model, and its evaluation.

From Python: `build_pipeline` builds diffusers' pipeline of weights and frozen parts, `generate` draws samples.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mindspeed_mm.tasks.generation.pipeline import GenerationPipeline, build_pipeline, open_pipeline
    from mindspeed_mm.tasks.generation.requests import Request, SamplingOptions
    from mindspeed_mm.tasks.generation.sampling import generate

__all__ = ["GenerationPipeline", "Request", "SamplingOptions", "build_pipeline", "generate", "open_pipeline"]

#: public name → module that defines it
_DEFINED_IN = {
    **dict.fromkeys(("GenerationPipeline", "build_pipeline", "open_pipeline"), "pipeline"),
    **dict.fromkeys(("Request", "SamplingOptions"), "requests"),
    "generate": "sampling",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used: inference_sora.py reads flags and files before torch is imported."""
    if name not in _DEFINED_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_DEFINED_IN[name]}"), name)
