"""The options of inference_sora.py: its flags, and the keys of model.json that are about sampling.

A training model.json and a published inference model.json both work: keys about sampling are taken out first, the rest
describes the model. A flag takes precedence over a key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from mindspeed_mm.configs.config import settle_caption_length
from mindspeed_mm.configs.files import read_json
from mindspeed_mm.configs.flags.spec import flag
from mindspeed_mm.configs.published import (
    NoEffect,
    Refused,
    is_given,
    is_not_zero,
    is_on,
    log_no_effect,
    published_paths,
    refusals,
)
from mindspeed_mm.configs.scalars import read_float, read_int, show
from mindspeed_mm.configs.sections import Bool, Count, DtypeName, Float, Int, Section, build_section, plain, raise_all
from mindspeed_mm.configs.sora_config import DiffusionConfig, Share, SoRAModelConfig
from mindspeed_mm.utils.errors import ConfigError

Sampler = Literal["euler", "unipc"]


@dataclass
class InferenceFlags:
    """Making images and videos."""

    mm_model: Annotated[
        str | None, flag("model.json of a training or of inference; absent = --load is a whole pipeline", path="file")
    ] = None
    mm_data: Annotated[
        str | None, flag("data.json of the training, for its tokenizers; absent = beside the encoders", path="file")
    ] = None
    load: Annotated[
        str | None,
        flag("run folder, iter folder, export or diffusers pipeline; absent = model.json's", path="directory"),
    ] = None
    ckpt_step: Annotated[
        int | Literal["best"] | None,
        flag("this iteration of the run folder, or the best one of --save-best; absent = the newest", minimum=0),
    ] = None
    ema: Annotated[
        bool | None,
        flag("averaged weights or the trained ones; absent = averaged if there are any", off_spellings=("--no-ema",)),
    ] = None
    low_noise_predictor: Annotated[
        str | None, flag("the second expert's weights: as --load, or a transformer's directory", path="directory")
    ] = None
    lora_load: Annotated[
        str | None,
        flag("adapters for the predictor: a directory or file of PEFT or diffusers", path="file or directory"),
    ] = None
    low_noise_lora_load: Annotated[
        str | None, flag("adapters for the second expert, likewise", path="file or directory")
    ] = None
    prompts: Annotated[str | None, flag("text file, one prompt a line", path="file")] = None
    images: Annotated[
        str | None, flag("text file of first frames, one path a line beside each prompt", path="file")
    ] = None
    save_path: Annotated[str | None, flag("folder that is written to", path="output")] = None
    size: Annotated[list[int] | None, flag("frames, height and width in pixels (1 frame: pictures)", minimum=1)] = None
    fps: Annotated[int | None, flag("frames a second of written videos", minimum=1)] = None
    num_inference_steps: Annotated[int | None, flag("denoising steps", minimum=1)] = None
    guidance_scale: Annotated[
        list[float] | None, flag("classifier-free guidance; 1 = none; two values for two experts", minimum=0)
    ] = None
    negative_prompt: Annotated[str | None, flag("what guidance leads away from; absent = the empty caption")] = None
    sampler: Annotated[Sampler | None, flag("solver of flow matching; absent = as model.json says")] = None
    shift: Annotated[
        float | None, flag("shift of the sampler's timesteps towards noise; absent = model.json's", above=0)
    ] = None
    dtype: Annotated[
        Literal["bf16", "fp16", "fp32"] | None,
        flag("of the predictor; absent = model.json's, --bf16's, else bf16 on an accelerator, fp32 on the host"),
    ] = None
    allow_tf32: Annotated[
        bool, flag("compute float32 products and convolutions in TF32 (HF32 on an NPU), as in training")
    ] = False
    seed: Annotated[int | None, flag("noise of a sample comes from it, the prompt's line and the sample's number")] = (
        None
    )
    batch_size: Annotated[int, flag("samples at a time", minimum=1)] = 1
    num_samples_per_prompt: Annotated[int, flag("samples of each prompt", minimum=1)] = 1
    cpu_offload: Annotated[bool | None, flag("parts of the model wait on the host for their turn")] = None
    overwrite: Annotated[bool, flag("make samples again that are there")] = False


def _read_scales(value: object) -> object:
    return [read_float(item) for item in (value if isinstance(value, list) else [value])] if value is not None else None


def _read_size(value: object) -> object:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 3:
        raise ValueError("expected three numbers: frames, height, width")
    return [read_int(item) for item in value]


Scales = Annotated[list[float] | None, BeforeValidator(_read_scales)]
Size3 = Annotated[list[int] | None, BeforeValidator(_read_size)]


class PipelineOptions(Section):
    """`pipeline_config`."""

    input_size: Size3 = Field(None, description="frames, height and width in pixels")
    guidance_scale: Scales = Field(None, description="guidance; two values for two experts")
    flow_shift: Float | None = Field(None, description="shift of the sampler's timesteps")
    seed: Int | None = Field(None, description="of the noise")
    cpu_offload: Bool = Field(False, description="parts of the model wait on the host for their turn")
    enable_offloading: Bool = Field(False, description="the same as cpu_offload")


class DiffusionSampling(Section):
    """`diffusion`, what is about sampling."""

    num_inference_steps: Count | None = Field(None, description="denoising steps")
    num_inference_timesteps: Count | None = Field(None, description="the same as num_inference_steps")
    guidance_scale: Scales = Field(None, description="guidance; two values for two experts")
    flow_shift: Float | None = Field(None, description="shift of the sampler's timesteps")


class SamplingKeys(Section):
    """Keys of model.json that are about sampling."""

    prompt: str | None = Field(None, description="text file, one prompt a line")
    image: str | None = Field(None, description="text file of first frames, one path a line")
    save_path: str | None = Field(None, description="folder that is written to")
    fps: Count | None = Field(None, description="frames a second of written videos")
    dtype: DtypeName | None = Field(None, description="of the predictor")
    low_noise_predictor: str | None = Field(None, description="weights of the second expert")
    lora_load: str | None = Field(None, description="adapters for the predictor: a directory or file")
    low_noise_lora_load: str | None = Field(None, description="adapters for the second expert")
    boundary_ratio: Share | None = Field(
        None, description="share of the noise range at which the second one takes over"
    )
    pipeline_config: PipelineOptions = Field(PipelineOptions(), description="size, guidance, memory")
    diffusion: DiffusionSampling = Field(DiffusionSampling(), description="steps, guidance, shift")


_NAMES = tuple(SamplingKeys.model_fields)
_OUTSIDE = (
    *("pipeline_class", "device", "use_prompt_preprocess", "video", "num_frames"),
    *("frame_interval", "start_frame", "strength", "dual_image"),
)
_REFUSED = (
    Refused("video", is_given, "making videos of videos is not there yet; remove it"),
    Refused(
        "pipeline_config.guidance_rescale", is_not_zero, "guided predictions are not rescaled; write 0, or remove it"
    ),
    Refused("pipeline_config.use_meanflow", is_on, "mean flows are not there; write false"),
    Refused(
        "frame_interval",
        lambda value: value not in (None, 1),
        "every frame of a sample is written; write 1, or remove it",
    ),
    Refused("use_prompt_preprocess", is_on, "prompts are not rewritten here; write false"),
)
_NO_EFFECT = (
    NoEffect(r"pipeline_class", "the predictor's family and the task say which pipeline it is"),
    NoEffect(r"num_frames", "pipeline_config.input_size says it (or --size)"),
    NoEffect(r"diffusion\..*", "the solver is diffusers' own, as it is made for flow matching"),
    NoEffect(r"device", "the device is what this machine has (or MM_DEVICE)"),
    NoEffect(r".*", "it belongs to another model's inference"),
)


@dataclass(frozen=True)
class SoRAInferenceConfig:
    """model.json as inference reads it.

    Attributes:
        model: the model's description.
        sampling: keys about sampling.
        tokenizers: directories of tokenizers, in the order of the text encoders.
        file: name of the file, for messages.
    """

    model: SoRAModelConfig
    sampling: SamplingKeys = field(default_factory=SamplingKeys)
    tokenizers: list[str | None] = field(default_factory=list)
    file: str = "model.json"

    @classmethod
    def from_file(cls, path: str | Path, data_file: str | None = None) -> SoRAInferenceConfig:
        """Read model.json, and of data.json, where it is given, tokenizers' directories and the longest caption."""
        model, data = read_json(Path(path)), read_json(Path(data_file)) if data_file else {}
        if isinstance(model, dict) and isinstance(data, Mapping):
            settle_caption_length(model, data)
        config = cls.from_dict(model, str(path))
        param = data.get("dataset_param") if isinstance(data, Mapping) else None
        found = param.get("tokenizer_config") if isinstance(param, Mapping) else None
        return cls(config.model, config.sampling, config.tokenizers or _directories(found), config.file)

    @classmethod
    def from_dict(cls, mapping: object, file: str | None = None) -> SoRAInferenceConfig:
        """Type the content of a model.json.

        Raises:
            ConfigError: unknown keys, wrong values, things that are not there yet.
        """
        file = file or getattr(mapping, "config_file", None) or "model.json"
        content = plain(mapping)
        if not isinstance(content, dict):
            raise ConfigError(f"{file}: found {show(content)}, expected an object with keys such as predictor")
        own, model = _split(content)
        published = published_paths("model")
        sampling, keys = build_section(SamplingKeys, own, file, "model.json", published, "model")
        raise_all(refusals(keys.published, _REFUSED, file))
        log_no_effect(keys.published, _NO_EFFECT, file)
        tokenizers = _directories(model.pop("tokenizer", None))
        return cls(SoRAModelConfig.from_dict(model, file), sampling, tokenizers, file)


def _split(content: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the keys about sampling, and those about the model."""
    own = {key: value for key, value in content.items() if key in (*_NAMES, *_OUTSIDE) and key != "diffusion"}
    model = {key: value for key, value in content.items() if key not in own}
    diffusion = content.get("diffusion")
    if isinstance(diffusion, Mapping):
        of_solver = published_paths("model") - {f"diffusion.{name}" for name in DiffusionConfig.model_fields}
        mine = {k for k in diffusion if k in DiffusionSampling.model_fields or f"diffusion.{k}" in of_solver}
        own["diffusion"] = {key: value for key, value in diffusion.items() if key in mine}
        model["diffusion"] = {key: value for key, value in diffusion.items() if key not in mine}
    return own, model


def _directories(tokenizers: object) -> list[str | None]:
    listed = tokenizers if isinstance(tokenizers, list) else [tokenizers] if tokenizers else []
    return [item.get("from_pretrained") if isinstance(item, Mapping) else None for item in listed]
