"""Samples that are asked for; nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Request:
    """A sample to generate.

    Attributes:
        prompt: its prompt.
        index: number of the prompt.
        sample: number of the sample among those of the prompt.
        image: its first frame (PIL), for models that begin with one.
    """

    prompt: str
    index: int = 0
    sample: int = 0
    image: Any = None


@dataclass(frozen=True)
class SamplingOptions:
    """Options of sampling.

    Attributes:
        size: frames, height and width in pixels.
        steps: denoising steps; None: the pipeline's default.
        guidance: scale of classifier-free guidance, one for each expert; None: the pipeline's default.
        negative_prompt: prompt from which guidance leads away; None: the empty caption.
        seed: seed of the noise.
    """

    size: tuple[int, int, int]
    steps: int | None = None
    guidance: tuple[float, ...] | None = None
    negative_prompt: str | None = None
    seed: int = 42
