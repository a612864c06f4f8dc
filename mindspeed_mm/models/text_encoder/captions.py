"""Captions to text states, by a diffusers pipeline that has tokenizers and text encoders only."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mindspeed_mm.configs.sora_config import SoRAModelConfig, TextEncoderConfig
from mindspeed_mm.models.predictor.family import PredictorFamily
from mindspeed_mm.utils.dtypes import to_torch_dtype
from mindspeed_mm.utils.errors import CheckpointError, ConfigError


class CaptionEncoder:
    """Encodes captions.

    Attributes:
        pipeline: a diffusers pipeline without transformer and autoencoder.
    """

    def __init__(self, family: PredictorFamily, pipeline: Any, encoders: Sequence[Any], max_length: int | None) -> None:
        self.pipeline = pipeline
        self._family, self._encoders, self._max_length = family, list(encoders), max_length

    def to(self, device: torch.device) -> CaptionEncoder:
        """Move the encoders."""
        for encoder in self._encoders:
            encoder.to(device)
        return self

    @torch.no_grad()
    def encode(self, captions: Sequence[str], device: torch.device) -> dict[str, torch.Tensor]:
        """Return tensors [captions, …] by the names of the transformer's arguments."""
        return self._family.text_states(self.pipeline, captions, device, self._max_length)


def component_name(kind: str, number: int) -> str:
    """Name of a pipeline's component: text_encoder, text_encoder_2, …"""
    return kind if number == 0 else f"{kind}_{number + 1}"


def open_captions(config: SoRAModelConfig, family: PredictorFamily, tokenizers: Sequence[str | None]) -> CaptionEncoder:
    """Load the text encoders that model.json describes.

    Args:
        config: model.json.
        family: of the predictor.
        tokenizers: directories that data.json names, in the order of the encoders; None where it names none.

    Raises:
        ConfigError: a directory is missing.
        CheckpointError: one can't be loaded.
    """
    import diffusers

    pipeline_class = getattr(diffusers, family.pipelines[family.task])
    takes = inspect.signature(pipeline_class.__init__).parameters
    parts: dict[str, Any] = {}
    encoders = []
    whole = Path(config.init_from_diffusers) if config.init_from_diffusers else None
    count = len(config.text_encoder) or sum(name.startswith("text_encoder") for name in takes)
    for number in range(count):
        described = config.text_encoder[number] if config.text_encoder else TextEncoderConfig()
        name = component_name("text_encoder", number)
        if name not in takes:
            raise ConfigError(
                f"{config.file}: 'text_encoder' lists {count} encoders; {pipeline_class.__name__} takes {number}"
            )
        directory = _directory(described.from_pretrained, whole, name, f"{config.file}: 'text_encoder[{number}]'")
        tokenizer = described.tokenizer or (tokenizers[number] if number < len(tokenizers) else None)
        beside = _tokenizer_directory(tokenizer, directory, component_name("tokenizer", number), config.file, number)
        parts[name] = _load_encoder(directory, described)
        parts[component_name("tokenizer", number)] = _load_tokenizer(beside)
        encoders.append(parts[name])
    pipeline = pipeline_class(
        **{n: parts.get(n) for n, p in takes.items() if n != "self" and _is_component(n, p, parts)}
    )
    lengths = [e.max_length for e in config.text_encoder if e.max_length is not None]
    return CaptionEncoder(family, pipeline, encoders, lengths[0] if lengths else None)


def _is_component(name: str, parameter: inspect.Parameter, parts: dict[str, Any]) -> bool:
    return name in parts or parameter.default is inspect.Parameter.empty


def _directory(said: str | None, whole: Path | None, name: str, where: str) -> Path:
    if said is not None:
        path = Path(said)
    elif whole is not None:
        path = whole / name
    else:
        raise ConfigError(f"{where}: 'from_pretrained' is missing: the directory of the encoder")
    if not (path / "config.json").is_file():
        raise ConfigError(f"{where}: '{path}' has no config.json; expected the directory of a transformers model")
    return path


def _tokenizer_directory(said: str | None, encoder: Path, name: str, file: str, number: int) -> Path:
    candidates = [Path(said)] if said is not None else [encoder.parent / name, encoder]
    for path in candidates:
        if any((path / found).is_file() for found in ("tokenizer_config.json", "tokenizer.json", "spiece.model")):
            return path
    tried = ", ".join(f"'{path}'" for path in candidates)
    raise ConfigError(
        f"{file}: no tokenizer for 'text_encoder[{number}]' in {tried}; write 'text_encoder.tokenizer', or "
        "'dataset_param.tokenizer_config.from_pretrained' in data.json"
    )


def _load_encoder(directory: Path, described: TextEncoderConfig) -> Any:
    import transformers

    said = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    names = said.get("architectures") or []
    found = next((getattr(transformers, name) for name in names if hasattr(transformers, name)), transformers.AutoModel)
    try:
        model = found.from_pretrained(str(directory), dtype=to_torch_dtype(described.dtype))
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"text encoder '{directory}' can't be loaded as {found.__name__}: {error}") from error
    model.requires_grad_(False)
    return model.eval()


def _load_tokenizer(directory: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(directory))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"tokenizer '{directory}' can't be loaded: {error}") from error
