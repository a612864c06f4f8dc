"""SoRAModel: frozen encoders, a diffusion objective, and the transformer that is trained."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_mm import accelerator
from mindspeed_mm.configs.files import read_json
from mindspeed_mm.configs.fsdp2_config import Fsdp2Config
from mindspeed_mm.configs.hf_directory import hub_advice
from mindspeed_mm.configs.sections import raise_all
from mindspeed_mm.configs.sora_config import SoRAModelConfig
from mindspeed_mm.data.generation.rule import GenerationRule
from mindspeed_mm.models.common.adapters import inject_adapters
from mindspeed_mm.models.common.base_model import adapt_class
from mindspeed_mm.models.common.build_context import current_build_context, fsdp2_config
from mindspeed_mm.models.common.first_weights import check_first_weights
from mindspeed_mm.models.common.loss import LossOutput
from mindspeed_mm.models.common.meta_build import build_on_meta
from mindspeed_mm.models.common.module import MultiModalModule
from mindspeed_mm.models.common.pipeline_layout import PipelineLayout
from mindspeed_mm.models.common.sharding_outline import ShardingOutline
from mindspeed_mm.models.generation.ae.autoencoder import autoencoder_strides
from mindspeed_mm.models.generation.diffusion.build import build_objective
from mindspeed_mm.models.generation.pipeline_parts import pipeline_layout
from mindspeed_mm.models.generation.predictor.family import PredictorFamily, find_predictor_family
from mindspeed_mm.models.generation.predictor_flops import PredictorFlops
from mindspeed_mm.models.generation.prefetch import PrefetchEncoder
from mindspeed_mm.models.generation.sample_encoder import SampleEncoder
from mindspeed_mm.models.transformers.inferred import block_lists
from mindspeed_mm.parallel.patterns import expand_patterns, nearest_path
from mindspeed_mm.utils.device import host_value, move_to_device
from mindspeed_mm.utils.dtypes import to_torch_dtype
from mindspeed_mm.utils.errors import ConfigError, did_you_mean
from mindspeed_mm.utils.log import notice
from mindspeed_mm.utils.sample_random import normals, uniforms

_FROZEN = ("ae", "text_encoder", "image_encoder")


class SoRAModel(MultiModalModule):
    """A generation model.

    Only the predictor is a module of it: the frozen parts are neither sharded nor saved, and stay in evaluation mode.

    Attributes:
        predictor: the diffusers transformer; paths of fsdp2.yaml begin with `predictor.`.
        family: the predictor's family.
        encoder: the frozen parts, loaded when the first sample needs them.
        prefetch: prefetches micro-batches and prepares them for `forward`.
        objective: its noise schedule and target.
        source: diffusers directory of the predictor, for exports; None if it starts from scratch.
        source_dtype: dtype of exports.
        ema_decay: decay of the averaged weights that model.json asks for; None: no average.
        weights_come_later: see FSDP2Mixin.
    """

    weights_come_later: bool = False

    def __init__(self, config: Any, tokenizers: Sequence[str | None] = (), *, num_microbatches: int = 1) -> None:
        """
        Args:
            config: model.json's content.
            tokenizers: directories named in data.json, in the order of the text encoders.
            num_microbatches: micro-batches of a rank in an optimizer step, and the most that are encoded at once.
        """
        super().__init__(config)
        self.described = SoRAModelConfig.from_dict(config)
        self.family, structure, self.source = resolve_predictor(self.described)
        predictor = self.described.predictor
        check_first_weights(
            self.family.model_class_name,
            weights_place(self.described),
            from_scratch=predictor.train_from_scratch,
            ignores=predictor.ignore_weights,
            file=f"{self.described.file}: 'predictor'",
            keys=(
                "from_pretrained" if predictor.from_pretrained else "init_from_diffusers",
                "from_pretrained (the folder transformer of a diffusers pipeline), init_from_diffusers (the whole "
                "pipeline) or --load (a checkpoint that is there)",
            ),
        )
        if self.described.enable_encoder_dp:
            notice(
                f"{self.described.file}: 'enable_encoder_dp' has no effect: every rank has samples of its own, so that "
                "none is encoded twice"
            )
        _require_image_encoder(self.described, self.family)
        self._tokenizers = list(tokenizers)
        interval = self.described.encoder_offload_interval
        self.encoder = SampleEncoder(
            self.described,
            self.family,
            tokenizers,
            needs_video=not self.described.load_video_features,
            needs_text=not self.described.load_text_features,
            stays=interval == 1,
        )
        self.prefetch = PrefetchEncoder(self.prepare, self.encoder, interval, num_microbatches)
        self.objective = build_objective(self.described.diffusion, self.family.defaults, self.described.file)
        self.source_dtype = to_torch_dtype(self.described.predictor.dtype)
        self.ema_decay = 0.9999 if self.described.use_ema else None
        self.predictor = _build(self.family, structure)
        context = current_build_context()
        if context.lora is not None:
            inject_adapters(self.predictor, context.lora, {"predictor": ("",)}, self.family.older_layers)
        self._computes_in = torch.float32
        self._flops = PredictorFlops(self.predictor)
        if not context.defer_weights:
            self._fill(context.load_weights)

    @property
    def sharded_module(self) -> Any:
        """The module that is sharded, saved and exported."""
        return self.predictor

    @property
    def computes_in(self) -> torch.dtype:
        """The dtype that the predictor computes in, and takes its latents in."""
        return self._computes_in

    @property
    def pending_weights(self) -> str | None:
        """The directory from which the predictor's weights are loaded; None: they are initialised randomly."""
        return self.source

    def next_batch(self, source: Iterator[dict[str, Any]]) -> dict[str, Any]:
        """Return the next micro-batch of `source`, encoded by the frozen parts and ready for `forward`."""
        return self.prefetch.next_batch(source)

    @torch.no_grad()
    def prepare(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Encode a collated micro-batch with the frozen parts, and draw its noise and timesteps.

        Args:
            batch: `video` [batch, 3, frames, height, width] or `latents` (with `latents_std`, where they are drawn);
                `captions` or `text.*`; `cond.*`; `sample_keys` [batch] int64, `sample_weights` [batch] float32.

        Returns:
            the arguments of `forward`, on the device.
        """
        device = accelerator.current().device()
        keys = host_value(batch["sample_keys"])
        encoded = self.encoder.encode(batch)
        latents = move_to_device(encoded["latents"], device, torch.float32)
        if encoded.get("latents_std") is not None:
            drawn = move_to_device(normals(keys, "posterior", latents.shape[1:]), device)
            latents = latents + move_to_device(encoded["latents_std"], device, torch.float32) * drawn
        latents = self.family.padded(latents)
        return {
            "latents": latents,
            "noise": move_to_device(normals(keys, "noise", latents.shape[1:]), device),
            "draws": uniforms(keys, "timestep"),
            "weights": move_to_device(batch["sample_weights"], device),
            "text": move_to_device(encoded["text"], device),
            "conditions": move_to_device(encoded["conditions"], device, torch.float32),
        }

    def forward(
        self,
        latents: torch.Tensor,
        noise: torch.Tensor,
        draws: torch.Tensor,
        weights: torch.Tensor,
        text: Mapping[str, torch.Tensor],
        conditions: Mapping[str, torch.Tensor],
    ) -> LossOutput:
        """Compute the loss of a micro-batch.

        Args:
            latents, noise: [batch, channels, frames, height, width] float32.
            draws: [batch] float64 in [0, 1), on the host.
            weights: [batch] float32: 1 for a sample, 0 for a filler.
            text, conditions: as `SampleEncoder.encode` returns them.

        Returns:
            the sum of the samples' losses, each a mean over its latent, and the number of samples.
        """
        noised = self.objective.noised(latents, noise, draws, self.tokens(latents))
        noisy, known = noised.noisy, conditions.get("known")
        if known is not None:
            noisy = torch.where(known > 0, conditions["known_latents"].to(noisy.dtype), noisy)
        guidance = self.described.diffusion.guidance
        noisy = noisy.to(self._computes_in)

        def predict() -> torch.Tensor:
            return self.family.predict(self.predictor, noisy, noised.timesteps, text, conditions, guidance)

        predicted = self._flops.run((noisy, text, conditions), predict) if torch.is_grad_enabled() else predict()
        errors = (predicted.float() - noised.target.float()) ** 2
        if known is None:
            of_samples = errors.flatten(1).mean(1)
        else:
            predicted_part = (1 - known).expand_as(errors).flatten(1)
            of_samples = (errors.flatten(1) * predicted_part).sum(1) / predicted_part.sum(1).clamp(min=1)
        loss = (of_samples * noised.weights * weights).sum()
        return {"loss": loss, "denominator": weights.sum(), "metrics": {}}

    def take_flops(self) -> float:
        """Return the FLOPs of the training micro-batches since the last call: of the predictor alone."""
        return self._flops.take()

    def tokens(self, latents: torch.Tensor) -> int:
        """Return the predictor's number of tokens for a sample with these latents."""
        frames, height, width = latents.shape[2:]
        patch = self.family.spatial_patch
        return -(-frames // self.family.temporal_patch) * (height // patch) * (width // patch)

    def fully_shard(self, process_group: dist.ProcessGroup | None = None, fsdp2_config_path: str | None = None) -> bool:
        """Shard the predictor; see FSDP2Mixin.fully_shard."""
        self.predictor.weights_come_later = self.weights_come_later
        self._override_sharding(fsdp2_config_path)
        return self.predictor.fully_shard(process_group=process_group, fsdp2_config_path=fsdp2_config_path)

    def plan_sharding(self, world_size: int, fsdp2_config_path: str | None = None) -> ShardingOutline:
        """See FSDP2Mixin.plan_sharding."""
        self._override_sharding(fsdp2_config_path)
        return self.predictor.plan_sharding(world_size, fsdp2_config_path)

    def _override_sharding(self, fsdp2_config_path: str | None) -> None:
        config = fsdp2_config(fsdp2_config_path)
        paths = self._paths(config)
        if paths["sub_modules_to_wrap"] is None:
            paths["sub_modules_to_wrap"] = block_paths(self.predictor)
        if not fsdp2_config_path:
            # published scripts that shard the optimizer's state by Megatron's flags bring no such file
            paths["sharding_size"] = "auto"
            notice(
                "there is no --fsdp2-config-path: the predictor is sharded over all ranks, block by block; fsdp2.yaml "
                "may say otherwise; its recompute_modules, or --recompute-granularity full, save memory"
            )
        if config.cast_forward_inputs and "cast_forward_inputs" in config.model_fields_set:
            notice("fsdp2.yaml: 'cast_forward_inputs' has no effect here: inputs are made in param_dtype or stay exact")
        # they are what diffusers' pipelines give to a transformer of that dtype: casts would round timesteps and angles
        self.predictor.fsdp2_overrides = {**self.predictor.fsdp2_overrides, **paths, "cast_forward_inputs": False}
        self._computes_in = to_torch_dtype(config.param_dtype) or torch.float32

    def _paths(self, config: Fsdp2Config) -> dict[str, Any]:
        """Return the path lists of fsdp2.yaml, relative to the predictor.

        Paths of frozen parts, which aren't sharded, are left out. One error lists all paths without a match.
        """
        keys = (
            *("sub_modules_to_wrap", "recompute_modules", "ignored_modules", "float8_modules"),
            *("activation_offload_modules", "chunk_mbs_modules", "chunk_mlp_modules"),
        )
        found: dict[str, Any] = dict.fromkeys(keys)
        problems: list[str] = []
        for key in keys:
            patterns, where = getattr(config, key), f"{config.file}: {key}"
            if patterns is None:
                continue
            inside: list[str] = []
            for pattern in patterns:
                head, _, rest = pattern.strip().partition(".")
                if head == "predictor":
                    inside.append(rest)
                elif head not in _FROZEN:
                    problems.append(
                        f"{where}: entry '{pattern}' matches nothing: paths of a generation model begin with "
                        f"predictor. (or {', '.join(_FROZEN)}){nearest_path(self.predictor, pattern, 'predictor.')}"
                    )
                elif key not in ("ignored_modules", "float8_modules"):
                    notice(f"{where}: '{pattern}' has no effect here: the {head} is frozen and stays whole")
            try:
                older = self.family.older_paths
                found[key] = list(expand_patterns(self.predictor, inside, where=where, older=older, at="predictor."))
            except ConfigError as error:
                problems.append(str(error))
        raise_all(problems)
        return found

    def _fill(self, load: bool) -> None:
        """Initialise or load the weights of a predictor built outside of a run."""
        from mindspeed_mm.parallel.materialize import materialize

        device = torch.device("cpu")
        materialize(self.predictor, device, device)
        self.predictor.draw_weights(storage_is_empty=True)
        if load and self.source is not None:
            from diffusers import AutoModel

            loaded = AutoModel.from_pretrained(self.source, torch_dtype=torch.float32)
            self.predictor.load_state_dict(loaded.state_dict())

    def export_layout(self) -> PipelineLayout | None:
        """Return the pipeline around the predictor, for exports that `DiffusionPipeline.from_pretrained` loads."""
        self._built_parts = tempfile.TemporaryDirectory(prefix="pipeline-parts-")  # until the export has copied it
        built = Path(self._built_parts.name)
        return pipeline_layout(self.described, self.family, self.objective, self._tokenizers, built)


def resolve_predictor(config: SoRAModelConfig) -> tuple[PredictorFamily, dict[str, Any], str | None]:
    """Return the family, the diffusers configuration, and the directory with weights (None: from scratch).

    Raises:
        ConfigError: the predictor's class isn't stated anywhere, or the stated values contradict each other.
    """
    described, file = config.predictor, config.file
    directory = weights_place(config)
    stated: dict[str, Any] | None = None
    if directory is not None:
        path = Path(directory) / "config.json"
        if not path.is_file():
            raise ConfigError(
                f"{file}: 'predictor.from_pretrained' '{directory}' has no config.json; expected a diffusers directory "
                f"(the folder transformer of a pipeline){hub_advice(directory)}"
            )
        stated = read_json(path)
    class_name = stated.get("_class_name") if stated is not None else None
    family_class = find_predictor_family(described.model_id, class_name, file)
    task = _task(config, family_class)
    if described.config is not None:
        structure = dict(described.config)
    elif stated is not None:
        structure = {k: v for k, v in stated.items() if not k.startswith("_")}
    else:
        structure = family_class.translate(described.structure, task, file)
    if described.structure and (described.config is not None or stated is not None):
        keys = ", ".join(f"predictor.{key}" for key in described.structure if key not in ("model_type", "task_type"))
        if keys:
            whose = "'predictor.config'" if described.config is not None else f"'{directory}'"
            notice(f"{file}: no effect here: {keys}: the structure comes from {whose}")
    structure = _complete(family_class, structure, file)
    return family_class(task, structure), structure, None if described.train_from_scratch else directory


def weights_place(config: SoRAModelConfig) -> str | None:
    """Return the directory of the predictor's weights, of a pipeline or its own; None: none is named."""
    described = config.predictor
    if described.from_pretrained is None and config.init_from_diffusers is not None and described.config is None:
        return str(Path(config.init_from_diffusers) / "transformer")
    return described.from_pretrained


def _task(config: SoRAModelConfig, family: type[PredictorFamily]) -> str:
    model_type = str(config.predictor.structure.get("model_type", ""))
    by_type = "i2v" if model_type in ("i2v", "wan2.2-i2v") else next(iter(family.pipelines))
    stated = config.task or config.predictor.structure.get("task_type") or by_type
    if model_type == "ti2v" and stated == "i2v":
        stated = "ti2v"
    if stated not in family.pipelines:
        raise ConfigError(
            f"{config.file}: 'task' is '{stated}'; {family.names[0]} is trained for {', '.join(family.pipelines)}"
        )
    return str(stated)


def _complete(family: type[PredictorFamily], structure: Mapping[str, Any], file: str) -> dict[str, Any]:
    """Complete the structure with the class's defaults, and refuse unknown keys."""
    import inspect

    import diffusers

    parameters = inspect.signature(getattr(diffusers, family.model_class_name).__init__).parameters
    known = {n: p.default for n, p in parameters.items() if n != "self"}
    unknown = [key for key in structure if key not in known]
    if unknown:
        raise ConfigError(
            f"{file}: 'predictor.config.{unknown[0]}' is no key of {family.model_class_name}"
            f"{did_you_mean(unknown[0], known)}"
        )
    return {**known, **structure}


def _require_image_encoder(config: SoRAModelConfig, family: PredictorFamily) -> None:
    if family.needs_image_encoder and not config.load_video_features and config.first_frame_encoder is None:
        raise ConfigError(
            f"{config.file}: 'image_encoder' is missing: this {family.model_class_name} is conditioned on the first "
            "frame by an image encoder; write its directory as image_encoder.from_pretrained (the folder image_encoder "
            "of a diffusers pipeline)"
        )


def _build(family: PredictorFamily, structure: Mapping[str, Any]) -> Any:
    import diffusers

    model_class = adapt_class(getattr(diffusers, family.model_class_name))
    model = build_on_meta(model_class, structure, current_build_context().seed)
    model.train()
    return model


def block_paths(predictor: Any) -> list[str]:
    """Return patterns of the repeated blocks of a diffusers model."""
    return [f"{path}.{{*}}" for path in block_lists(predictor)]


def generation_rule(config: SoRAModelConfig, seed: int) -> GenerationRule:
    """Return the requirements of a model on its samples, without building it.

    Args:
        config: model.json.
        seed: seed of the run.
    """
    family, _, _ = resolve_predictor(config)
    whole = Path(config.init_from_diffusers) / "vae" if config.init_from_diffusers else None
    temporal, spatial = autoencoder_strides(config.ae, whole, family.defaults.strides, family.defaults.ae)
    rates = [encoder.ucg_rate for encoder in config.text_encoder if encoder.ucg_rate is not None]
    return GenerationRule(
        temporal_stride=temporal,
        spatial_multiple=spatial * family.spatial_patch,
        temporal_patch=family.temporal_patch,
        text_dropout=rates[0] if rates else None,
        seed=seed,
        made_by="pixel" if config.ae is not None and config.ae.model_id == "pixel" else family.defaults.ae,
        needs_conditions=family.task in ("i2v", "ti2v"),
        features_of=_features_of(config, family),
    )


def _features_of(config: SoRAModelConfig, family: PredictorFamily) -> dict[str, Any]:
    """Return the settings that must match those of extracted features, named as in their features.json."""
    named: dict[str, Any] = {"predictor": family.names[0]}
    if config.ae is not None:
        keys = ("norm_latents", "norm_mode", "do_sample", "scaling_factor", "shift_factor")
        named |= {f"ae.{key}": getattr(config.ae, key) for key in keys if key in config.ae.model_fields_set}
    return named
