"""Generate samples of prompts, each from noise of its own."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mindspeed_mm.data.generation.rule import GenerationRule
from mindspeed_mm.tasks.generation.pipeline import GenerationPipeline
from mindspeed_mm.tasks.generation.requests import Request, SamplingOptions
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.sample_random import generator, normals, sample_key

_NOISE = "noise"
_TAKES_LATENTS = ("WanPipeline",)  # its check of sizes is stricter than the model requires


def check_size(size: Sequence[int], rule: GenerationRule, *, makes_videos: bool = True) -> None:
    """Raise a ConfigError that names the nearest size, if a model can't generate samples of this one."""
    frames, height, width = size
    if not makes_videos and frames != 1:
        raise ConfigError(
            f"size {frames} {height} {width}: this model makes pictures; write 1 frame: 1 {height} {width}"
        )
    if rule.fits(frames, height, width):
        return
    multiple, stride = rule.spatial_multiple, rule.temporal_stride
    nearest = [_near(frames - 1, stride, 0) + 1, *(_near(side, multiple, multiple) for side in (height, width))]
    asks = f"{stride}·k + 1 frames and " if stride > 1 else ""
    raise ConfigError(
        f"size {frames} {height} {width} can't be made with {rule.made_by}: expected {asks}a height and a width that "
        f"are multiples of {multiple}; the nearest is {' '.join(map(str, nearest))}"
    )


def generate(pipeline: GenerationPipeline, requests: Sequence[Request], options: SamplingOptions) -> list[np.ndarray]:
    """Generate samples in one batch.

    The noise of each depends on (seed, index, sample) alone, not on the rest of the batch.

    Args:
        pipeline: result of `build_pipeline` or `open_pipeline`.
        requests: samples to generate; pipelines that begin with a picture take one at a time.
        options: options of sampling.

    Returns:
        [frames, height, width, 3] uint8 of each request.

    Raises:
        ConfigError: a size that the model can't generate, a picture that is missing.
    """
    takes = inspect.signature(pipeline.pipeline.__call__).parameters
    check_size(options.size, pipeline.rule, makes_videos="num_frames" in takes)
    if pipeline.needs_image:
        return [_call(pipeline, [request], options, takes)[0] for request in requests]
    return list(_call(pipeline, requests, options, takes)) if requests else []


def default_steps_and_guidance(pipeline: GenerationPipeline) -> tuple[int, float | None]:
    """Return the pipeline's own number of steps and scale of guidance."""
    takes = inspect.signature(pipeline.pipeline.__call__).parameters
    guidance = takes.get(_guidance_name(pipeline, takes))
    return takes["num_inference_steps"].default, guidance.default if guidance is not None else None


def _call(
    pipeline: GenerationPipeline,
    requests: Sequence[Request],
    options: SamplingOptions,
    takes: Mapping[str, inspect.Parameter],
) -> np.ndarray:
    frames, height, width = options.size
    keys = [sample_key(options.seed, request.index, request.sample) for request in requests]
    asked: dict[str, Any] = {
        "prompt": [request.prompt for request in requests],
        "negative_prompt": [options.negative_prompt or ""] * len(requests),
        "height": height,
        "width": width,
        "num_frames": frames,
        "generator": [generator(key, _NOISE) for key in keys],
        "output_type": "np",
        "max_sequence_length": pipeline.max_length,
        "num_inference_steps": options.steps,
        **_guidance(pipeline, options.guidance, takes),
    }
    if type(pipeline.pipeline).__name__ in _TAKES_LATENTS:
        asked |= _latents(pipeline, keys, options.size)
    elif type(pipeline.pipeline).__name__.startswith("Wan") and pipeline.rule.temporal_stride == 1:
        asked["num_frames"] = frames - 1  # which it rounds up
    if pipeline.needs_image:
        if requests[0].image is None:
            raise ConfigError("this model begins with a picture; give --images, one path a line beside each prompt")
        asked["image"] = requests[0].image
    with torch.no_grad():
        result = pipeline.pipeline(**{k: v for k, v in asked.items() if k in takes and v is not None})
    values = np.asarray(result.frames if hasattr(result, "frames") else result.images)
    values = values if values.ndim == 5 else values[:, None]
    return (values.clip(0, 1) * 255).round().astype(np.uint8)


def _latents(pipeline: GenerationPipeline, keys: Sequence[int], size: tuple[int, int, int]) -> dict[str, Any]:
    """Noise of the exact shape, with sizes that pass the pipeline's own check."""
    frames, height, width = size
    spatial = pipeline.pipeline.vae_scale_factor_spatial
    shape = ((frames - 1) // pipeline.rule.temporal_stride + 1, height // spatial, width // spatial)
    rounded = {name: -(-side // 16) * 16 for name, side in (("height", height), ("width", width))}
    return {"latents": normals(keys, _NOISE, (pipeline.latent_channels, *shape)), **rounded}


def _guidance_name(pipeline: GenerationPipeline, takes: Mapping[str, inspect.Parameter]) -> str:
    """Name of the argument of classifier-free guidance: in distilled models guidance_scale is an embedding's value."""
    structure = pipeline.pipeline.transformer.config
    distilled = structure.get("guidance_embeds")
    return "true_cfg_scale" if "true_cfg_scale" in takes and not distilled else "guidance_scale"


def _guidance(
    pipeline: GenerationPipeline, scales: tuple[float, ...] | None, takes: Mapping[str, inspect.Parameter]
) -> dict[str, Any]:
    if scales is None:
        return {}
    if "guidance_scale" not in takes and getattr(pipeline.pipeline, "guider", None) is not None:
        pipeline.pipeline.guider = pipeline.pipeline.guider.new(guidance_scale=scales[0])
        return {}
    chosen = {_guidance_name(pipeline, takes): scales[0]}
    if len(scales) > 1:
        if len(scales) > 2 or getattr(pipeline.pipeline, "transformer_2", None) is None:
            raise ConfigError(
                f"guidance_scale holds {len(scales)} values ({', '.join(f'{s:g}' for s in scales)}); expected one"
                + (
                    " or two"
                    if getattr(pipeline.pipeline, "transformer_2", None) is not None
                    else ", as there is one expert"
                )
            )
        chosen["guidance_scale_2"] = scales[1]
    return chosen


def _near(value: int, step: int, lowest: int) -> int:
    return max(lowest, (value + step // 2) // step * step)
