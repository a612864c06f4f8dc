"""`model.json` of a model that makes images or videos: autoencoder, text encoders, diffusion and the trained predictor.

Each part may come from a diffusers directory (`from_pretrained`), and all of them together from the directory of a
whole pipeline (`init_from_diffusers`). A part's structure may be given in diffusers' own words (`config`) or in the
published ones, which the part's family translates.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

from mindspeed_mm.configs.model_config import check_ignored_weights
from mindspeed_mm.configs.published import is_on, log_no_effect, published_paths, refusals
from mindspeed_mm.configs.scalars import read_float, show
from mindspeed_mm.configs.sections import (
    Bool,
    Count,
    DtypeName,
    Float,
    Section,
    key_paths,
    one_of,
    plain,
    raise_all,
    sort_keys,
    unknown_key_problems,
    validate_section,
)
from mindspeed_mm.configs.sora_rules import AE_STRUCTURE, IDLE_SORA_KEYS, REFUSED_SORA_KEYS, STRUCTURE
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.log import notice

TASKS = ("t2v", "i2v", "ti2v", "t2i")


def _read_list(value: object) -> object:
    """One object or a list of them."""
    return [value] if isinstance(value, dict) else value


def _read_object(value: object) -> object:
    if value is not None and not isinstance(value, dict):
        raise ValueError("expected an object with the keys of diffusers' config.json")
    return value


def _read_share(value: object) -> float:
    share = read_float(value)
    if not 0 <= share <= 1:
        raise ValueError("expected a share of the noise range, from 0 (all noise) to 1 (none)")
    return share


Structure = Annotated[dict[str, Any] | None, BeforeValidator(_read_object)]
Share = Annotated[float, BeforeValidator(_read_share)]


class TilingParam(Section):
    """`ae.tiling_param`: pixels."""

    tile_sample_min_height: Count | None = Field(None, description="height of a tile")
    tile_sample_min_width: Count | None = Field(None, description="width of a tile")
    tile_sample_stride_height: Count | None = Field(None, description="from one tile to the next, downwards")
    tile_sample_stride_width: Count | None = Field(None, description="from one tile to the next, to the right")


class I2vProcessor(Section):
    """`ae.i2v_processor`: the published place of the encoder of the first frame."""

    image_encoder: str | None = Field(None, description="the same as image_encoder.from_pretrained")
    processor_path: str | None = Field(None, description="the same as image_encoder.from_pretrained")


class AeConfig(Section):
    """`ae`: the frozen autoencoder."""

    model_id: str | None = Field(
        None, description="pixel (no autoencoder), a published name, or a diffusers class; absent = what the files say"
    )
    from_pretrained: str | None = Field(
        None, description="diffusers directory of the autoencoder, or a .safetensors file of its class's tensors"
    )
    config: Structure = Field(None, description='pixel\'s own configuration, e.g. {"channels": 1}')
    dtype: DtypeName = Field("fp32", description="dtype that it computes in")
    enable_tiling: Bool = Field(False, description="encode tile by tile, to save memory")
    use_tiling: Bool = Field(False, description="the same as enable_tiling")
    tiling_param: TilingParam = Field(TilingParam(), description="sizes of the tiles")
    norm_latents: Bool = Field(True, description="shift and scale latents to about mean 0, standard deviation 1")
    norm_mode: Literal["channel_specified_shift_scale", "shift_scale"] | None = Field(
        None,
        description="by each channel's mean and deviation, or by one shift and scale; absent = what its config has",
    )
    do_sample: Bool = Field(False, description="draw latents from the posterior; false = its mean")
    scaling_factor: Float | None = Field(None, description="takes the place of its config's")
    shift_factor: Float | None = Field(None, description="takes the place of its config's")
    i2v_processor: I2vProcessor = Field(I2vProcessor(), description="encoder of the first frame")

    _structure: dict[str, Any] = PrivateAttr(default_factory=dict)

    @property
    def structure(self) -> dict[str, Any]:
        """Published keys of the structure (block_out_channels …), for weights without a config.json."""
        return self._structure


class TextEncoderConfig(Section):
    """`text_encoder`, or one of its list: a frozen text encoder."""

    model_id: str | None = Field(None, description="published name or transformers class; absent = what the files say")
    from_pretrained: str | None = Field(None, description="directory of the encoder")
    tokenizer: str | None = Field(None, description="directory of its tokenizer; absent = data.json's, or beside it")
    dtype: DtypeName = Field("bf16", description="dtype that it computes in")
    ucg_rate: Annotated[Float, Field(ge=0, le=1)] | None = Field(
        None, description="share of captions that are left out, so that guidance can be used; absent = data.json's cfg"
    )
    byT5_ckpt_path: str | None = Field(
        None, description="file of a glyph encoder's weights (a torch checkpoint), in place of the directory's"
    )
    max_length: Count | None = Field(
        None,
        description="longest caption in tokens; absent = data.json's tokenizer_config.model_max_length, or the "
        "family's",
    )


class ImageEncoderConfig(Section):
    """`image_encoder`: a frozen encoder of the first frame, for image-to-video models that take its features."""

    from_pretrained: str | None = Field(None, description="directory of the encoder")
    dtype: DtypeName = Field("fp32", description="dtype that it computes in")


class PredictorConfig(Section):
    """`predictor`: the diffusion transformer that is trained."""

    model_id: str | None = Field(
        None,
        description="family: wan, hunyuanvideo, hunyuanvideo15, flux, qwenimage, cogvideox, ltx, sd3, or as published",
    )
    from_pretrained: str | None = Field(None, description="diffusers directory of the transformer")
    config: Structure = Field(None, description="diffusers configuration, where there is no directory")
    train_from_scratch: Bool = Field(
        False, description="random weights; the directory holds none, or ignore_weights is true"
    )
    ignore_weights: Bool = Field(
        False, description="with train_from_scratch: the weights that the directory holds stay unread on purpose"
    )
    dtype: DtypeName | None = Field(None, description="dtype that exports are written in; absent = the directory's")

    _structure: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _weights_are_read_or_not(self) -> PredictorConfig:
        check_ignored_weights(self.train_from_scratch, self.ignore_weights)
        return self

    @property
    def structure(self) -> dict[str, Any]:
        """Published keys of the structure (hidden_size, num_layers …), for the family to translate."""
        return self._structure


class DiffusionConfig(Section):
    """`diffusion`: noise schedule, draw of timesteps, weighting."""

    model_id: str | None = Field(
        None, description="flow_matching, ddpm, or a published or diffusers name; absent = what the family uses"
    )
    num_train_timesteps: Count = Field(1000, description="timesteps of the schedule")
    shift: Float | None = Field(
        None, description="moves flow matching's timesteps towards noise; absent = the family's"
    )
    train_timestep_shift: Float | None = Field(
        None, description="the same, where shift is that of sampling; absent = shift"
    )
    use_dynamic_shifting: Bool = Field(False, description="shift by the number of tokens of a sample")
    base_shift: Float | None = Field(None, description="dynamic shift: exponent at base_seq_len; absent = the family's")
    max_shift: Float | None = Field(None, description="dynamic shift: exponent at max_seq_len; absent = the family's")
    base_seq_len: Count | None = Field(None, description="dynamic shift: tokens; absent = the family's")
    max_seq_len: Count | None = Field(None, description="dynamic shift: tokens; absent = the family's")
    sampling: Literal["uniform", "logit_normal", "mode"] | None = Field(
        None, description="density that timesteps are drawn from; absent = the family's"
    )
    snr: Literal["uniform", "lognorm"] | None = Field(
        None, description="published name of sampling: lognorm is logit_normal"
    )
    logit_mean: Float = Field(0.0, description="logit_normal: mean; above 0: more noise")
    logit_std: Float = Field(1.0, description="logit_normal: standard deviation")
    mode_scale: Float = Field(1.29, description="mode: scale")
    weighting: Literal["uniform", "sigma_sqrt", "cosmap", "gaussian"] | None = Field(
        None,
        description="weight of a timestep's loss; uniform: none; gaussian: most in the middle; absent = the family's",
    )
    sigma_min: Float = Field(0.0, description="noise at the last step of the table")
    extra_one_step: Bool = Field(True, description="the table leaves out its last step")
    min_timestep_boundary: Share = Field(0.0, description="timesteps are drawn from here (0: all noise) …")
    max_timestep_boundary: Share = Field(1.0, description="… to here: the range of one of two experts")
    prediction_type: Literal["epsilon", "v_prediction", "sample", "flow_prediction"] | None = Field(
        None, description="what the predictor predicts; absent = the family's"
    )
    beta_start: Float | None = Field(None, description="ddpm: first beta; absent = the family's")
    beta_end: Float | None = Field(None, description="ddpm: last beta; absent = the family's")
    beta_schedule: str | None = Field(None, description="ddpm: diffusers' name of the curve; absent = the family's")
    trained_betas: list[Float] | None = Field(
        None, description="ddpm: the beta of every timestep, in place of a curve; absent = the curve"
    )
    rescale_betas_zero_snr: Bool | None = Field(
        None, description="ddpm: scale the betas so that nothing is left of the last latents; absent = the family's"
    )
    guidance: Float = Field(1.0, description="value of the guidance embedding of distilled models (flux, hunyuanvideo)")

    @property
    def training_shift(self) -> float | None:
        """Shift of the timesteps that training draws; None: the family's."""
        return self.shift if self.train_timestep_shift is None else self.train_timestep_shift

    @property
    def density(self) -> str | None:
        """Density that timesteps are drawn from, by either key; None: the family's."""
        return "logit_normal" if self.sampling is None and self.snr == "lognorm" else self.sampling or self.snr


class SoRAModelConfig(Section):
    """What `pretrain_sora.py` trains.

    Each part comes from a diffusers directory: its own (`from_pretrained`), or that of a whole pipeline
    (`init_from_diffusers`). Only `predictor` is trained, sharded and saved.
    """

    task: Annotated[str, one_of(TASKS, ("vace", "flf2v"))] | None = Field(
        None, description="t2v, i2v, ti2v or t2i; absent = as model_type says, else t2v, or t2i for models of images"
    )
    init_from_diffusers: str | None = Field(
        None, description="directory of a whole diffusers pipeline; parts named below take the place of its own"
    )
    ae: AeConfig | None = Field(None, description="autoencoder")
    text_encoder: Annotated[list[TextEncoderConfig], BeforeValidator(_read_list)] = Field(
        [], description="text encoder, or a list of them"
    )
    image_encoder: ImageEncoderConfig | None = Field(None, description="encoder of the first frame")
    predictor: PredictorConfig = Field(PredictorConfig(), description="what is trained")
    diffusion: DiffusionConfig = Field(DiffusionConfig(), description="how it is trained")
    load_video_features: Bool = Field(
        False, description="data are latents that extract-features has made; no autoencoder"
    )
    load_text_features: Bool = Field(
        False, description="data are text states that extract-features has made; no encoder"
    )
    encoder_offload_interval: Count = Field(
        1,
        description="micro-batches that are encoded at once, after which the encoders leave the device",
    )
    enable_encoder_dp: Bool = Field(
        False, description="share encoding among ranks that take the same sample; there are none with FSDP2"
    )
    trust_remote_code: Bool = Field(False, description="the same as --trust-remote-code, for the whole run")
    use_ema: Bool = Field(False, description="keep averaged weights (--ema-decay, 0.9999 where that is absent)")

    _file: str = PrivateAttr("model.json")

    @property
    def first_frame_encoder(self) -> ImageEncoderConfig | None:
        """The encoder of the first frame, from wherever it is described."""
        if self.image_encoder is not None and self.image_encoder.from_pretrained is not None:
            return self.image_encoder
        published = self.ae.i2v_processor if self.ae is not None else I2vProcessor()
        directory = published.image_encoder or published.processor_path
        if directory is None and self.init_from_diffusers is not None:
            beside = Path(self.init_from_diffusers) / "image_encoder"
            directory = str(beside) if (beside / "config.json").is_file() else None
        if directory is None:
            return self.image_encoder
        return (self.image_encoder or ImageEncoderConfig()).model_copy(update={"from_pretrained": directory})

    @property
    def file(self) -> str:
        """Name of the file, for messages."""
        return self._file

    @classmethod
    def from_dict(cls, mapping: object, file: str | None = None) -> SoRAModelConfig:
        """Type the content of model.json, and log which published keys have no effect here.

        Args:
            mapping: ConfigReader or dict.
            file: name to use in messages.

        Raises:
            ConfigError: unknown or missing keys, wrong values, things that are not there yet.
        """
        if isinstance(mapping, cls):
            return mapping
        file = file or getattr(mapping, "config_file", None) or "model.json"
        data = plain(mapping)
        if not isinstance(data, dict):
            raise ConfigError(f"{file}: found {show(data)}, expected an object with keys such as predictor")
        published = published_paths("model")
        keys = sort_keys(cls, data, published)
        typed = dict(keys.typed)
        encoders, inner, unknown = _encoders(data.get("text_encoder"), published)
        if encoders is not None:
            typed["text_encoder"] = encoders
        no_effect = {**keys.published, **inner}
        structure = {p.removeprefix("predictor."): v for p, v in no_effect.items() if STRUCTURE.fullmatch(p)}
        no_effect = {p: v for p, v in no_effect.items() if not STRUCTURE.fullmatch(p)}
        of_ae = {p.removeprefix("ae."): v for p, v in no_effect.items() if AE_STRUCTURE.fullmatch(p)}
        fields = [*key_paths(cls), *(f"text_encoder.{name}" for name in TextEncoderConfig.model_fields)]
        problems = unknown_key_problems("model", file, {**keys.unknown, **unknown}, fields, published)
        problems += refusals({**data, **keys.published}, REFUSED_SORA_KEYS, file)  # data: "dpo" is an object
        listed = data.get("text_encoder")
        for item in listed if isinstance(listed, list) else [listed]:
            given = {f"text_encoder.{key}": value for key, value in item.items()} if isinstance(item, dict) else {}
            problems += refusals(given, REFUSED_SORA_KEYS, file)
        config = None
        if not problems:
            config, problems = validate_section(cls, typed, file)
            if config and config.ae and config.ae.dtype != "fp32" and is_on(keys.published.get("patch.ae_float32")):
                both = f"'patch.ae_float32' is true and 'ae.dtype' {config.ae.dtype}"
                problems.append(f"{file}: {both}; write fp32 as 'ae.dtype', or false")
        raise_all(problems)
        assert config is not None
        if config.ae is not None:
            config.ae._structure.update(of_ae)
            place = Path(config.ae.from_pretrained or "")
            if place.suffix == ".safetensors" and not config_beside(place):
                no_effect = {p: v for p, v in no_effect.items() if p.removeprefix("ae.") not in of_ae}
        log_no_effect(no_effect, IDLE_SORA_KEYS, file)
        if config.enable_encoder_dp:
            notice(
                f"{file}: no effect here: enable_encoder_dp: no ranks take the same sample, so none encodes it twice"
            )
        config._file = file
        config.predictor._structure.update(structure)
        return config


def config_beside(weights: Path) -> dict[str, Any]:
    """Return the diffusers config.json beside a file of weights; {} where there is none that names a class."""
    try:
        content = json.loads((weights.parent / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) and "_class_name" in content else {}


def _encoders(value: object, published: frozenset[str]) -> tuple[list[Any] | None, dict[str, Any], dict[str, Any]]:
    """Return the typed keys of each text encoder, published keys without effect, and unknown ones, by their paths."""
    if value is None:
        return None, {}, {}
    inside = {p.removeprefix("text_encoder.") for p in published if p.startswith("text_encoder.")}
    typed, no_effect, unknown = [], {}, {}
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, dict):
            typed.append(item)
            continue
        keys = sort_keys(TextEncoderConfig, item, inside)
        typed.append(keys.typed)
        no_effect.update({f"text_encoder.{path}": v for path, v in keys.published.items()})
        unknown.update({f"text_encoder.{path}": v for path, v in keys.unknown.items()})
    return typed, no_effect, unknown
