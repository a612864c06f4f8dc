"""Making images and videos with a trained model, and figures about them.

From Python: `build_pipeline` puts weights and frozen parts together into diffusers' pipeline, `generate` draws samples.
"""

from __future__ import annotations

from mindspeed_mm.tasks.generation.pipeline import GenerationPipeline, build_pipeline, open_pipeline
from mindspeed_mm.tasks.generation.sampling import Request, SamplingOptions, generate

__all__ = ["GenerationPipeline", "Request", "SamplingOptions", "build_pipeline", "generate", "open_pipeline"]
