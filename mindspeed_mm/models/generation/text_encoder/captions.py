"""Encoding of captions with a diffusers pipeline of tokenizers and text encoders only."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_type_hints

import torch

from mindspeed_mm.configs.hf_directory import hub_advice
from mindspeed_mm.configs.sora_config import SoRAModelConfig, TextEncoderConfig
from mindspeed_mm.models.generation.predictor.family import PredictorFamily
from mindspeed_mm.models.generation.text_encoder.loading import load_encoder
from mindspeed_mm.models.generation.text_encoder.masks import make_masks_unread
from mindspeed_mm.utils.device import AsynchronousCopies
from mindspeed_mm.utils.errors import CheckpointError, ConfigError


class CaptionEncoder:
    """Encodes captions into text states.

    Attributes:
        pipeline: a diffusers pipeline without transformer and autoencoder.
        encoders: its text encoders.
    """

    def __init__(self, family: PredictorFamily, pipeline: Any, encoders: Sequence[Any], max_length: int | None) -> None:
        self.pipeline = pipeline
        self._family, self.encoders, self._max_length = family, list(encoders), max_length
        for encoder in encoders:
            make_masks_unread(encoder)

    def to(self, device: torch.device) -> CaptionEncoder:
        """Move the encoders to a device."""
        for encoder in self.encoders:
            encoder.to(device)
        return self

    @torch.no_grad()
    def encode(self, captions: Sequence[str], device: torch.device) -> dict[str, torch.Tensor]:
        """Return tensors [captions, …] by the names of the transformer's arguments."""
        with AsynchronousCopies():
            return self._family.text_states(self.pipeline, captions, device, self._max_length)


def component_name(kind: str, number: int) -> str:
    """Return the name of a pipeline's component: text_encoder, text_encoder_2, …"""
    return kind if number == 0 else f"{kind}_{number + 1}"


def open_captions(config: SoRAModelConfig, family: PredictorFamily, tokenizers: Sequence[str | None]) -> CaptionEncoder:
    """Load the text encoders that model.json describes.

    Args:
        config: model.json.
        family: family of the predictor.
        tokenizers: directories named in data.json, in the order of the encoders; None: not named.

    Raises:
        ConfigError: a directory is missing, there are too few or too many encoders, a model_id that doesn't fit.
        CheckpointError: one can't be loaded.
    """
    import diffusers

    pipeline_class = getattr(diffusers, family.pipelines[family.task])
    takes = inspect.signature(pipeline_class.__init__).parameters
    slots = sorted(name for name in takes if name.startswith("text_encoder"))
    expected = get_type_hints(pipeline_class.__init__)
    whole = Path(config.init_from_diffusers) if config.init_from_diffusers else None
    listed = config.text_encoder
    if len(listed) > len(slots) or (whole is None and len(listed) < len(slots)):
        classes = ", ".join(_class_name(expected.get(slot)) for slot in slots)
        raise ConfigError(
            f"{config.file}: 'text_encoder' lists {len(listed)} encoder{'s' if len(listed) != 1 else ''}; "
            f"{pipeline_class.__name__} takes {len(slots)}: {classes}"
        )
    parts: dict[str, Any] = {}
    for number, slot in enumerate(slots):
        described = listed[number] if number < len(listed) else TextEncoderConfig()
        where = f"{config.file}: 'text_encoder[{number}]'"
        directory = _directory(described.from_pretrained, whole, slot, where)
        tokenizer = described.tokenizer or (tokenizers[number] if number < len(tokenizers) else None)
        beside = tokenizer_directory(tokenizer, directory, component_name("tokenizer", number), config.file, number)
        wanted = expected.get(slot)
        fitting, trusted = wanted if inspect.isclass(wanted) else None, config.trust_remote_code
        parts[slot] = load_encoder(directory, described, fitting, where, trusted)
        parts[component_name("tokenizer", number)] = _load_tokenizer(beside, trusted)
    encoders = [parts[slot] for slot in slots]
    pipeline = _pipeline(
        pipeline_class, {n: parts.get(n) for n, p in takes.items() if n != "self" and _is_component(n, p, parts)}
    )
    lengths = [e.max_length for e in config.text_encoder if e.max_length is not None]
    return CaptionEncoder(family, pipeline, encoders, lengths[0] if lengths else None)


def _pipeline(pipeline_class: Any, parts: dict[str, Any]) -> Any:
    """Build a pipeline of these parts only."""
    try:
        return pipeline_class(**parts)
    except AttributeError:  # the class reads its autoencoder's configuration, which captions don't need
        from mindspeed_mm.models.generation.ae.pixel import PixelAutoencoder

        pipeline = pipeline_class(**{**parts, "vae": PixelAutoencoder()})
        pipeline.register_modules(vae=None)
        return pipeline


def _is_component(name: str, parameter: inspect.Parameter, parts: dict[str, Any]) -> bool:
    return name in parts or parameter.default is inspect.Parameter.empty


def _directory(stated: str | None, whole: Path | None, name: str, where: str) -> Path:
    if stated is not None:
        path = Path(stated)
    elif whole is not None:
        path = whole / name
    else:
        raise ConfigError(f"{where}: 'from_pretrained' is missing: the directory of the encoder")
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"{where}: '{path}' has no config.json; expected the directory of a transformers model{hub_advice(path)}"
        )
    return path


def tokenizer_directory(stated: str | None, encoder: Path, name: str, file: str, number: int) -> Path:
    """Return the directory of an encoder's tokenizer: the stated one, or beside or inside the encoder's.

    Args:
        stated: directory named in model.json or data.json.
        encoder: the encoder's directory.
        name: name of the component, and of its folder beside the encoder's.
        file: model.json, for messages.
        number: number of the encoder.

    Raises:
        ConfigError: there is none.
    """
    candidates = [Path(stated)] if stated is not None else [encoder.parent / name, encoder]
    for path in candidates:
        if any((path / found).is_file() for found in ("tokenizer_config.json", "tokenizer.json", "spiece.model")):
            return path
    tried = ", ".join(f"'{path}'" for path in candidates)
    raise ConfigError(
        f"{file}: no tokenizer for 'text_encoder[{number}]' in {tried}; write 'text_encoder.tokenizer', or "
        "'dataset_param.tokenizer_config.from_pretrained' in data.json"
    )


def _class_name(expected: Any) -> str:
    return getattr(expected, "__name__", None) or "any"


def _load_tokenizer(directory: Path, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(directory), trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"tokenizer '{directory}' can't be loaded: {error}") from error
