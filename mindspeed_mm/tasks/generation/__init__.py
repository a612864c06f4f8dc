"""Generation of images and videos with a trained model, and its evaluation.

From Python: `build_pipeline` builds diffusers' pipeline of weights and frozen parts, `generate` draws samples.
"""

from __future__ import annotations

from mindspeed_mm.tasks.generation.pipeline import GenerationPipeline, build_pipeline, open_pipeline
from mindspeed_mm.tasks.generation.sampling import Request, SamplingOptions, generate

__all__ = ["GenerationPipeline", "Request", "SamplingOptions", "build_pipeline", "generate", "open_pipeline"]
