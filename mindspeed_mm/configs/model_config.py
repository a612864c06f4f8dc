"""`model.json` of a run with FSDP2: which HF model is trained, what of it is frozen, and which loss.

The HF directory's own config is authoritative for the model's structure; numbers that published files repeat here have
no effect. Families register further keys with `register_model_keys`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

from mindspeed_mm.configs.families_not_there import missing_class
from mindspeed_mm.configs.flags.model import LossArguments
from mindspeed_mm.configs.hf_directory import describe_missing_model
from mindspeed_mm.configs.model_rules import ATTENTION_NAMES, ATTENTION_NOT_YET, IDLE_MODEL_KEYS, REFUSED_MODEL_KEYS
from mindspeed_mm.configs.published import log_no_effect, published_paths, refusals, warn_of_near_keys
from mindspeed_mm.configs.reader import ConfigReader
from mindspeed_mm.configs.scalars import show
from mindspeed_mm.configs.sections import (
    Bool,
    Count,
    Float,
    Paths,
    Section,
    key_paths,
    one_of,
    plain,
    raise_all,
    sort_keys,
    unknown_key_problems,
    validate_section,
)
from mindspeed_mm.utils.errors import ConfigError

LossType = Literal["default", "per_sample_loss", "per_token_loss", "token_loss", "square_loss"]
Attention = Annotated[str | None, one_of(ATTENTION_NAMES, ATTENTION_NOT_YET)]

_family_keys: dict[str, set[str]] = {}


def register_model_keys(model_id: str, keys: Iterable[str]) -> None:
    """Accept further keys in the model.json of one family.

    Args:
        model_id: the family, as model.json's `model_id` names it.
        keys: dotted paths such as `text_decoder.router_bias`. Their values are in `TransformersModelConfig.own_keys`.
    """
    _family_keys.setdefault(model_id, set()).update(keys)


class ModuleBlock(Section):
    """One part of the model. Without `freeze` it is trained."""

    freeze: Bool | None = Field(None, description="true = its parameters stay as they are; absent = trained")
    attn_implementation: Attention = Field(None, description="attention of this part; absent = the fastest kernel")


class ImageEncoderBlock(Section):
    """`image_encoder`."""

    vision_encoder: ModuleBlock = Field(ModuleBlock(), description="vision tower")
    vision_projector: ModuleBlock = Field(ModuleBlock(), description="what joins the tower to the language model")


class AudioEncoder(Section):
    """`audio_encoder`."""

    audio_encoder: ModuleBlock = Field(ModuleBlock(), description="audio tower")


#: default of `max_logits_mib`
MAX_LOGITS_MIB = 1024.0


class LossConfig(Section):
    """`loss_cfg`."""

    loss_type: LossType | None = Field(
        None,
        description="per_token_loss (when absent): sum over the global batch's targets ÷ their number; others: "
        "default, per_sample_loss, token_loss, square_loss, with their published meanings",
    )
    compute_mode: Literal["default", "chunk", "dynamic_chunk"] = Field(
        "default",
        description="default: the logits of all targets at once, up to max_logits_mib; chunk, dynamic_chunk: never "
        "hold those of a whole row",
    )
    chunk_size: Count | None = Field(
        None, description="tokens in a chunk (1024); for dynamic_chunk: rows × tokens (4096)"
    )
    max_logits_mib: Annotated[Float, Field(gt=0)] = Field(
        MAX_LOGITS_MIB,
        description="with compute_mode default: larger logits (MiB of targets × vocabulary ÷ tensor-parallel size in "
        "float32) are computed in chunks of at most this size",
    )
    router_aux_loss_coef: Annotated[Float, Field(ge=0)] = Field(
        0.0,
        description="weight of the experts' load-balancing loss beside the token loss (docs/models.md); absent = 0, or "
        "what config.json asks for with output_router_logits",
    )

    @property
    def effective_chunk_size(self) -> int:
        """`chunk_size`, or the default of the compute mode."""
        return self.chunk_size or (4096 if self.compute_mode == "dynamic_chunk" else 1024)


def read_plugins(value: object) -> Any:
    """The modules that `plugin` names: a name stands for a list of one."""
    return [value] if isinstance(value, str) else value


Plugins = Annotated[list[str], BeforeValidator(read_plugins)]

#: published spelling of a family → the one that transformers has
PUBLISHED_FAMILIES = {"qwen2_5vl": "qwen2_5_vl"}


#: model_type of a directory → ids of other families that published files call it by
_CALLED_IN_PUBLISHED_FILES = {"qwen2_5_omni": ("qwen2_5_vl",), "qwen2_5_omni_thinker": ("qwen2_5_vl",)}


def _read_family(value: object) -> object:
    return PUBLISHED_FAMILIES.get(value, value) if isinstance(value, str) else value


def settled_model_id(model_id: str | None, model_type: str | None) -> str | None:
    """Return the family that a model_id stands for with a directory of this model_type.

    Published files call some families by the name of another.
    """
    family = None if model_id is None else PUBLISHED_FAMILIES.get(model_id, model_id)
    return model_type if family in _CALLED_IN_PUBLISHED_FILES.get(str(model_type), ()) else family


FamilyName = Annotated[str | None, BeforeValidator(_read_family)]


def check_ignored_weights(train_from_scratch: bool, ignore_weights: bool) -> None:
    """Refuse `ignore_weights` without the key that it belongs to.

    Raises:
        ValueError: with what to write.
    """
    if ignore_weights and not train_from_scratch:
        raise ValueError(
            "'ignore_weights' is true, but 'train_from_scratch' is not, so the weights of the directory would be read; "
            "write \"train_from_scratch\": true as well, or remove 'ignore_weights'"
        )


def freeze_answer(config: Section, paths: Iterable[str]) -> bool | None:
    """Return the one value of the keys at `paths`, all of which freeze the same part; None: none of them is given.

    Raises:
        ValueError: they disagree.
    """
    given = {}
    for path in paths:
        value: Any = config
        for name in path.split("."):
            value = getattr(value, name)
        if value is not None:
            given[path] = value
    if len(set(given.values())) > 1:
        answers = ", ".join(f"'{path}' is {str(value).lower()}" for path, value in given.items())
        raise ValueError(f"{answers}; they mean the same thing, keep one")
    return next(iter(given.values()), None)


class TransformersModelConfig(Section):
    """model.json, typed."""

    model_id: FamilyName = Field(None, description="registered family or HF model_type; absent = the HF architecture")
    init_from_hf_path: str | None = Field(None, description="HF directory: config, weights, tokenizer. Required")
    train_from_scratch: Bool = Field(
        False, description="random weights; the directory holds none, or ignore_weights is true"
    )
    ignore_weights: Bool = Field(
        False, description="with train_from_scratch: the weights that the directory holds stay unread on purpose"
    )
    trust_remote_code: Bool = Field(False, description="the same as --trust-remote-code, for the whole run")
    plugin: Plugins = Field([], description="modules imported first; they may register models")
    attn_implementation: Attention = Field(None, description="attention of every part that names none itself")
    image_encoder: ImageEncoderBlock = Field(ImageEncoderBlock(), description="vision tower and projector")
    vision_encoder: ModuleBlock = Field(ModuleBlock(), description="the same as image_encoder.vision_encoder")
    vision_projector: ModuleBlock = Field(ModuleBlock(), description="the same as image_encoder.vision_projector")
    audio_encoder: AudioEncoder = Field(AudioEncoder(), description="audio tower")
    text_decoder: ModuleBlock = Field(ModuleBlock(), description="language model")
    freeze_vision_model: Bool | None = Field(None, description="the same as image_encoder.vision_encoder.freeze")
    freeze_vision_projection: Bool | None = Field(None, description="the same as image_encoder.vision_projector.freeze")
    freeze_language_model: Bool | None = Field(None, description="the same as text_decoder.freeze")
    freeze: Paths = Field(
        [], description="ours: paths of modules or parameters that are not trained, in the patterns of fsdp2.yaml"
    )
    loss_cfg: LossConfig = Field(LossConfig(), description="loss")

    _own_keys: dict[str, Any] = PrivateAttr(default_factory=dict)
    _file: str = PrivateAttr("model.json")

    @property
    def file(self) -> str:
        """The file's name, for messages."""
        return self._file

    @model_validator(mode="after")
    def _one_answer_each(self) -> TransformersModelConfig:
        check_ignored_weights(self.train_from_scratch, self.ignore_weights)
        for part in _FREEZE_KEYS:
            self._freeze_of(part)
        for key in ("vision_encoder", "vision_projector"):
            inside, beside = getattr(self.image_encoder, key), getattr(self, key)
            if None not in (inside.attn_implementation, beside.attn_implementation) and inside != beside:
                raise ValueError(f"'image_encoder.{key}' and '{key}' name different attention kernels; keep one")
        return self

    def _freeze_of(self, part: str) -> bool | None:
        return freeze_answer(self, _FREEZE_KEYS[part])

    @property
    def freeze_vision_encoder(self) -> bool | None:
        """Whether the vision tower is frozen; None = not given, so it is trained."""
        return self._freeze_of("vision_encoder")

    @property
    def freeze_vision_projector(self) -> bool | None:
        """Whether the projector is frozen; None = not given, so it is trained."""
        return self._freeze_of("vision_projector")

    @property
    def freeze_audio_encoder(self) -> bool | None:
        """Whether the audio tower is frozen; None = not given, so it is trained."""
        return self._freeze_of("audio_encoder")

    @property
    def freeze_text_decoder(self) -> bool | None:
        """Whether the language model is frozen; None = not given, so it is trained."""
        return self._freeze_of("text_decoder")

    def attention_of(self, part: Literal["vision", "audio", "text"]) -> str | None:
        """Return the attention kernel asked for one part of the model, or None for transformers' own choice."""
        by_part = {
            "vision": self.image_encoder.vision_encoder.attn_implementation or self.vision_encoder.attn_implementation,
            "audio": self.audio_encoder.audio_encoder.attn_implementation,
            "text": self.text_decoder.attn_implementation,
        }
        return by_part[part] or self.attn_implementation

    @property
    def own_keys(self) -> dict[str, Any]:
        """Dotted path → value of the keys that a family registered, or that a user's own model brought."""
        return self._own_keys

    @classmethod
    def from_dict(cls, mapping: object, file: str | None = None, own_model: bool = False) -> TransformersModelConfig:
        """Type the content of model.json, and log which published keys have no effect here.

        Args:
            mapping: ConfigReader or dict.
            file: name to use in messages.
            own_model: the model's class is the user's own: keys of its own are allowed (they are in `own_keys`; one
                close to a known key is warned of) and `init_from_hf_path` may be absent. A `plugin` allows the former.

        Raises:
            ConfigError: unknown or missing keys, wrong values, things that are not there yet.
        """
        if isinstance(mapping, cls):
            return mapping
        file = file or getattr(mapping, "config_file", None) or "model.json"
        data = plain(mapping)
        if not isinstance(data, dict):
            raise ConfigError(f"{file}: found {show(data)}, expected an object with keys such as model_id")
        published = published_paths("model")
        registered = _family_keys.get(str(_read_family(data.get("model_id"))), set())
        keys = sort_keys(cls, data, published | registered)
        own = {path: value for path, value in keys.published.items() if _under(path, registered)}
        no_effect = {path: value for path, value in keys.published.items() if path not in own}

        problems: list[str] = []
        if own_model or keys.typed.get("plugin"):
            own |= keys.unknown
            warn_of_near_keys(cls, data, file, published | registered)
        else:
            fields = [*key_paths(cls), *registered]
            absent = missing_class(data.get("model_id"), file)
            raise_all([absent] if absent else [])  # its other keys are those of its own class
            problems += unknown_key_problems("model", file, keys.unknown, fields, published)
        if own_model:
            own, no_effect = own | no_effect, {}  # a script's own model may read them
        else:
            problems += refusals({**no_effect, **_raw_values(keys.typed)}, REFUSED_MODEL_KEYS, file)
        config = None
        if not problems:
            config, problems = validate_section(cls, keys.typed, file)
        if not own_model and not keys.typed.get("init_from_hf_path"):
            problems.append(f"{file}: key 'init_from_hf_path' is missing: the HF directory with the model's config")
        raise_all(problems)
        assert config is not None
        log_no_effect(no_effect, IDLE_MODEL_KEYS, file)
        config._own_keys.update(own)
        config._file = file
        return config


_FREEZE_KEYS = {
    "vision_encoder": ("image_encoder.vision_encoder.freeze", "vision_encoder.freeze", "freeze_vision_model"),
    "vision_projector": (
        "image_encoder.vision_projector.freeze",
        "vision_projector.freeze",
        "freeze_vision_projection",
    ),
    "audio_encoder": ("audio_encoder.audio_encoder.freeze",),
    "text_decoder": ("text_decoder.freeze", "freeze_language_model"),
}


def _under(path: str, paths: Iterable[str]) -> bool:
    return any(path == known or path.startswith(known + ".") for known in paths)


def _raw_values(typed: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in typed.items():
        path = f"{prefix}{key}"
        values.update(_raw_values(value, path + ".") if isinstance(value, dict) else {path: value})
    return values


def warn_of_near_model_keys(mapping: ConfigReader | Mapping[str, Any], file: str | None = None) -> None:
    """Log which keys in the model.json of a user's own script look like misspelt known ones."""
    warn_of_near_keys(TransformersModelConfig, plain(mapping), file or "model.json", published_paths("model"))


def choose_loss_type(flags: LossArguments, loss_cfg: LossConfig) -> LossType:
    """Return the loss type that flags and model.json ask for; per_token_loss if neither does.

    Raises:
        ConfigError: they ask for different ones.
    """
    types: dict[str, LossType] = {
        "calculate_per_token_loss": "per_token_loss",
        "calculate_per_sample_loss": "per_sample_loss",
        "calculate_square_loss": "square_loss",
        "calculate_token_loss": "token_loss",
    }
    asked = [flag for flag in types if getattr(flags, flag)]
    if asked and loss_cfg.loss_type is not None and loss_cfg.loss_type != types[asked[0]]:
        raise ConfigError(
            f"--{asked[0].replace('_', '-')} asks for {types[asked[0]]}, but model.json's 'loss_cfg.loss_type' is "
            f"'{loss_cfg.loss_type}'; keep one of them"
        )
    return types[asked[0]] if asked else loss_cfg.loss_type or "per_token_loss"


def check_local_path(file: str, key: str, path: str | None) -> list[str]:
    """Return a sentence if a model's directory is missing on this machine."""
    if not path or os.path.exists(os.path.expanduser(path)):
        return []
    return [f"{file}: '{key}': {describe_missing_model(path)}"]
