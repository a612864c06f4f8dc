"""Build diffusers' pipeline of a family from a description and weights."""

from __future__ import annotations

import copy
import functools
import inspect
import json
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mindspeed_mm import accelerator
from mindspeed_mm.checkpoint.pipeline_folder import is_pipeline
from mindspeed_mm.checkpoint.run_folder import CheckpointStep
from mindspeed_mm.configs.hf_directory import describe_missing_model
from mindspeed_mm.configs.scalars import SHORT_DTYPE_NAMES
from mindspeed_mm.configs.sora_config import AeConfig, SoRAModelConfig
from mindspeed_mm.configs.sora_inference import Sampler, SoRAInferenceConfig
from mindspeed_mm.data.generation.rule import GenerationRule
from mindspeed_mm.models.common.pipeline_layout import INDEX
from mindspeed_mm.models.generation.diffusion.build import build_objective
from mindspeed_mm.models.generation.parts import FrozenParts, open_parts
from mindspeed_mm.models.generation.predictor.family import PredictorFamily
from mindspeed_mm.models.generation.sora_model import SoRAModel, generation_rule, resolve_predictor
from mindspeed_mm.tasks.generation.sampler import build_sampler, with_shift
from mindspeed_mm.tasks.generation.weights import fill_with_adapters, load_predictor
from mindspeed_mm.utils.dtypes import to_torch_dtype
from mindspeed_mm.utils.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline, ModelMixin

_WAN_MULTIPLE = 16  # Wan's pipelines take no other sizes of pictures that they are given


@dataclass(frozen=True)
class GenerationPipeline:
    """diffusers' pipeline, with the facts that sampling needs.

    Attributes:
        pipeline: the diffusers pipeline, on the device.
        rule: frames and sides that it can generate.
        needs_image: whether it begins with a picture.
        latent_channels: channels of the noise.
        max_length: longest prompt in tokens; None: the pipeline's own.
        weights: where the predictor's weights came from, in words.
    """

    pipeline: DiffusionPipeline
    rule: GenerationRule
    needs_image: bool
    latent_channels: int
    max_length: int | None = None
    weights: str = ""


def build_pipeline(
    config: SoRAInferenceConfig,
    *,
    load: str | Path | None = None,
    step: CheckpointStep | None = None,
    ema: bool | None = None,
    dtype: str | None = None,
    sampler: Sampler | None = None,
    shift: float | None = None,
    low_noise_predictor: str | Path | None = None,
    adapters: str | Path | None = None,
    low_noise_adapters: str | Path | None = None,
    cpu_offload: bool | None = None,
) -> GenerationPipeline:
    """Build the pipeline of a model's weights, its frozen parts and a sampler.

    Args:
        config: model.json.
        load: run folder, checkpoint, export, or pipeline; None: the place of the predictor in model.json.
        step: iteration of the run folder, or "best"; None: the newest.
        ema: averaged weights or not; None: averaged ones if there are any.
        dtype: the predictor's (bf16, fp16, fp32); None: model.json's, else bf16 on an accelerator, fp32 on the host.
        sampler, shift: see `build_sampler`; None: model.json's.
        low_noise_predictor: weights of a second expert; None: model.json's, if any.
        adapters, low_noise_adapters: adapters for the predictor and for the second expert; None: model.json's, if any.
        cpu_offload: parts stay on the host while they aren't used; None: model.json's.

    Raises:
        ConfigError: the parts of model.json don't fit together.
        CheckpointError: weights are missing or don't fit.
    """
    model, keys = config.model, config.sampling
    family, structure, source = resolve_predictor(model)
    place = load or source
    if place is None:
        raise ConfigError(
            f"{config.file}: 'predictor' names no weights (no from_pretrained, or train_from_scratch); give --load, "
            "the run folder of its training"
        )
    of_predictor = _dtype(dtype or keys.dtype or model.predictor.dtype)
    parts = open_parts(model, family, config.tokenizers)
    pipeline_class = _pipeline_class(family)
    load_weights = functools.partial(load_predictor, family.model_class_name, structure, dtype=of_predictor, ema=ema)
    transformer, words = load_weights(place, step=step, base=source, adapters=adapters or keys.lora_load)
    components: dict[str, Any] = {"transformer": transformer}
    second, boundary = _second_expert(config, low_noise_predictor, pipeline_class)
    of_second = _adapters_of_second(config, low_noise_adapters, second)
    if second is not None:
        expert, more = load_weights(second, base=_beside(config), adapters=of_second)
        components |= {"transformer_2": expert, "boundary_ratio": boundary}
        words = f"{words}, {more}"
    objective = build_objective(model.diffusion, family.defaults, model.file)
    wanted_shift = shift or keys.pipeline_config.flow_shift or keys.diffusion.flow_shift
    components["scheduler"] = build_sampler(objective, model.diffusion.model_id, sampler, wanted_shift)
    pipeline = _assembled(model, family, parts, components)
    offload = cpu_offload if cpu_offload is not None else _offload(config)
    return _described(_placed(pipeline, offload), model, family, words)


def pipeline_of_training(model: SoRAModel, parts: FrozenParts) -> GenerationPipeline:
    """Return the pipeline around a model in training, sharded as it is, with the sampler of its objective.

    Args:
        model: the model; `Backend.generation` prepares it.
        parts: its frozen parts, on the device. Nothing of them is changed.
    """
    scheduler = build_sampler(model.objective, model.described.diffusion.model_id)
    predictor = LivePredictor(model.predictor, model.computes_in)
    pipeline = _assembled(model.described, model.family, parts, {"transformer": predictor, "scheduler": scheduler})
    pipeline.set_progress_bar_config(disable=True)
    return _described(pipeline, model.described, model.family, "in training")


def pipeline_rule(config: SoRAModelConfig) -> tuple[GenerationRule, bool]:
    """Return the sizes that the pipeline of a model can make, and whether these are of videos; nothing is built."""
    family, _, _ = resolve_predictor(config)
    pipeline_class = _pipeline_class(family)
    makes_videos = "num_frames" in inspect.signature(pipeline_class.__call__).parameters
    return _rule(generation_rule(config, 0), pipeline_class), makes_videos


class LivePredictor:
    """What a pipeline asks of its transformer, answered by one in training.

    It is no module, so that the pipeline doesn't move it, and has no caches, so that none are left in it.
    """

    def __init__(self, predictor: nn.Module, dtype: torch.dtype) -> None:
        """
        Args:
            dtype: that it computes in; its parameters are float32 until they are gathered.
        """
        self._predictor, self.dtype, self.config = predictor, dtype, predictor.config

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self._predictor(*args, **kwargs)

    def cache_context(self, name: str, **of_step: object) -> AbstractContextManager[None]:
        """Return a context for one of several predictions of a step, whose values aren't kept."""
        return nullcontext()


def _pipeline_class(family: PredictorFamily) -> type[DiffusionPipeline]:
    import diffusers

    return getattr(diffusers, family.pipelines[family.task])


def _assembled(
    model: SoRAModelConfig, family: PredictorFamily, parts: FrozenParts, own: Mapping[str, Any]
) -> DiffusionPipeline:
    """The pipeline of frozen parts, and of `own`: transformers and scheduler by the names of its arguments."""
    pipeline_class = _pipeline_class(family)
    takes = inspect.signature(pipeline_class.__init__).parameters
    pipeline = pipeline_class(**{**_components(parts, takes), **own, **_settings(family.task, takes)})
    _normalise_as_trained(pipeline.vae, model.ae or AeConfig())
    return pipeline


def _described(
    pipeline: DiffusionPipeline, model: SoRAModelConfig, family: PredictorFamily, words: str
) -> GenerationPipeline:
    lengths = [encoder.max_length for encoder in model.text_encoder if encoder.max_length is not None]
    return GenerationPipeline(
        pipeline,
        _rule(generation_rule(model, 0), type(pipeline)),
        family.task in ("i2v", "ti2v"),
        family.latent_channels,
        lengths[0] if lengths else family.defaults.text_length,
        words,
    )


def open_pipeline(
    directory: str | Path,
    *,
    dtype: str | None = None,
    sampler: Sampler | None = None,
    shift: float | None = None,
    adapters: str | Path | None = None,
    low_noise_adapters: str | Path | None = None,
    cpu_offload: bool | None = None,
) -> GenerationPipeline:
    """Open the directory of a whole pipeline, such as a run's export; the arguments are those of `build_pipeline`.

    Raises:
        CheckpointError: it is no pipeline, or can't be loaded.
    """
    import diffusers

    import mindspeed_mm.models.generation.ae.pixel  # noqa: F401  (directories may name it, and diffusers imports it not by itself)

    path = Path(directory)
    if not path.is_dir():
        raise CheckpointError(f"--load: {describe_missing_model(directory)}")
    if not is_pipeline(path):
        raise CheckpointError(
            f"'{path}' has no {INDEX}, so it is no whole pipeline; give --mm-model as well, the model.json of its "
            "training"
        )
    try:
        pipeline = diffusers.DiffusionPipeline.from_pretrained(str(path), dtype=_dtype(dtype))
    except (OSError, ValueError, RuntimeError, AttributeError, ImportError) as error:
        raise CheckpointError(f"pipeline '{path}' can't be loaded: {error}") from error
    for name, files in (("transformer", adapters), ("transformer_2", low_noise_adapters)):
        if files is not None and (model := pipeline.components.get(name)) is None:
            raise CheckpointError(f"pipeline '{path}' has no {name} that the adapters '{files}' could belong to")
        if files is not None:
            fill_with_adapters(model, path / name, files)
    pipeline.scheduler = with_shift(pipeline.scheduler, sampler, shift)
    temporal = getattr(pipeline, "vae_scale_factor_temporal", 1)
    spatial = getattr(pipeline, "vae_scale_factor_spatial", getattr(pipeline, "vae_scale_factor", 8))
    structure = pipeline.transformer.config
    patch = structure.get("patch_size", 1)
    side = int(patch[-1]) if isinstance(patch, (list, tuple)) else int(patch)
    rule = GenerationRule(temporal, spatial * side, made_by=type(pipeline.vae).__name__)
    channels = int(structure.get("out_channels") or structure["in_channels"])
    needs_image = "image" in inspect.signature(pipeline.__call__).parameters
    return GenerationPipeline(
        _placed(pipeline, bool(cpu_offload)), _rule(rule, type(pipeline)), needs_image, channels, None, str(path)
    )


def _dtype(name: str | None) -> torch.dtype:
    if name is None:
        name = "fp32" if accelerator.current().is_host else "bf16"
    dtype = to_torch_dtype(SHORT_DTYPE_NAMES.get(name, name))
    assert dtype is not None
    return dtype


def _settings(task: str, takes: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """Arguments of a pipeline that are neither models nor tokenizers."""
    import diffusers

    found: dict[str, Any] = {"guider": diffusers.ClassifierFreeGuidance()} if "guider" in takes else {}
    return {**found, "expand_timesteps": True} if task == "ti2v" and "expand_timesteps" in takes else found


def _components(parts: FrozenParts, takes: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """The frozen parts by the names of the pipeline's arguments; None for missing ones without a default."""
    assert parts.ae is not None and parts.captions is not None
    found = {name: part for name, part in parts.captions.pipeline.components.items() if part is not None}
    found["vae"] = copy.copy(parts.ae.model)  # the same weights, and a configuration of its own, which is changed
    if parts.image_encoder is not None:
        found["image_encoder"] = parts.image_encoder.model
        found["image_processor"] = found["feature_extractor"] = parts.image_encoder.processor
    required = [n for n, p in takes.items() if n != "self" and p.default is inspect.Parameter.empty]
    return {**dict.fromkeys(required), **{name: part for name, part in found.items() if name in takes}}


def _second_expert(
    config: SoRAInferenceConfig, given: str | Path | None, pipeline_class: type[DiffusionPipeline]
) -> tuple[Path | None, float]:
    """Weights of the expert of low noise, and the share of the noise range at which it takes over."""
    whole = Path(config.model.init_from_diffusers) if config.model.init_from_diffusers else None
    place = given or config.sampling.low_noise_predictor or _beside(config)
    boundary = config.sampling.boundary_ratio
    if place is None:
        if boundary is not None:
            raise ConfigError(
                f"{config.file}: 'boundary_ratio' is {boundary}, and there is no second expert; write "
                "'low_noise_predictor' (or --low-noise-predictor), or remove it"
            )
        return None, 0.0
    if "transformer_2" not in inspect.signature(pipeline_class.__init__).parameters:
        raise ConfigError(
            f"{config.file}: 'low_noise_predictor': {pipeline_class.__name__} takes no second expert; remove it"
        )
    if boundary is None and whole is not None and is_pipeline(whole):
        boundary = json.loads((whole / INDEX).read_text(encoding="utf-8")).get("boundary_ratio")
    if boundary is None:
        raise ConfigError(
            f"{config.file}: 'boundary_ratio' is missing: the share of the noise range at which 'low_noise_predictor' "
            "takes over (Wan 2.2: 0.875 for text to video, 0.9 for image to video)"
        )
    return Path(place), boundary


def _adapters_of_second(
    config: SoRAInferenceConfig, given: str | Path | None, second: Path | None
) -> str | Path | None:
    adapters = given or config.sampling.low_noise_lora_load
    if adapters is not None and second is None:
        raise ConfigError(
            f"{config.file}: adapters for a second expert ({adapters}), and there is none; write "
            "'low_noise_predictor' (or --low-noise-predictor), or name them as --lora-load"
        )
    return adapters


def _beside(config: SoRAInferenceConfig) -> Path | None:
    """The second expert in the pipeline that model.json names, if there is one."""
    whole = config.model.init_from_diffusers
    place = Path(whole) / "transformer_2" if whole else None
    return place if place is not None and (place / "config.json").is_file() else None


def _normalise_as_trained(vae: ModelMixin, described: AeConfig) -> None:
    """Let the pipeline undo the normalisation of latents in training, where it differs from the VAE's config."""
    current = vae.config
    factor = described.scaling_factor if described.scaling_factor is not None else current.get("scaling_factor")
    shift = described.shift_factor if described.shift_factor is not None else current.get("shift_factor")
    if not described.norm_latents:
        factor, shift = 1.0, 0.0
    changed = {"scaling_factor": factor, "shift_factor": shift}
    if current.get("latents_mean") is not None and (not described.norm_latents or described.norm_mode == "shift_scale"):
        channels = len(current["latents_mean"])
        changed["latents_mean"] = [float(shift or 0.0)] * channels
        changed["latents_std"] = [1 / float(factor or 1.0)] * channels
    changed = {name: value for name, value in changed.items() if name in current and current[name] != value}
    if changed:
        vae.register_to_config(**changed)


def _offload(config: SoRAInferenceConfig) -> bool:
    options = config.sampling.pipeline_config
    return options.cpu_offload or options.enable_offloading


def _placed(pipeline: DiffusionPipeline, offload: bool) -> DiffusionPipeline:
    current = accelerator.current()
    device = current.device()
    pipeline.set_progress_bar_config(disable=True)
    if offload and not current.is_host:
        pipeline.enable_model_cpu_offload(device=device)
        return pipeline
    return pipeline.to(device)


def _rule(rule: GenerationRule, pipeline: type[DiffusionPipeline]) -> GenerationRule:
    """The model's rule, with the further limits of its pipeline."""
    if pipeline.__name__ != "WanImageToVideoPipeline" or rule.spatial_multiple % _WAN_MULTIPLE == 0:
        return rule
    return GenerationRule(rule.temporal_stride, _WAN_MULTIPLE, rule.temporal_patch, made_by=rule.made_by)
