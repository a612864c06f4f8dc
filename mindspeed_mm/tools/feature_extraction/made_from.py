"""The settings that decide features: two runs of the extraction into one folder must agree on them."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_mm.configs.generation_data import GenerationDataConfig
from mindspeed_mm.configs.sora_config import AeConfig, SoRAModelConfig, TextEncoderConfig
from mindspeed_mm.data.generation.dataset import ShapedDataset
from mindspeed_mm.models.generation.ae.weights_file import directory_of, is_lone_file
from mindspeed_mm.models.generation.predictor.family import PredictorFamily

#: preprocess_parameters that apply when features are read, or have no influence
_LATER = ("cfg", "media_timeout", "media_max_pixels", "trust_remote_code")
_MOST_ENCODERS = 3  # of a pipeline whose model.json names none
_WEIGHTS = (".safetensors", ".bin", ".model", ".json", ".txt")


def made_from(
    model: SoRAModelConfig,
    data: GenerationDataConfig,
    family: PredictorFamily,
    tokenizers: Sequence[str | None],
    dataset: ShapedDataset,
    options: argparse.Namespace,
    needs_text: bool,
) -> dict[str, Any]:
    """Describe the settings that decide features: dotted names → JSON values.

    Directories are identified by their configuration and the sizes of their files, not by their names: a folder that
    was moved is the same.
    """
    whole = model.init_from_diffusers
    image = model.first_frame_encoder
    described: dict[str, Any] = {
        "task": family.task,
        "predictor": family.names[0],
        "ae": {
            **(model.ae.model_dump(exclude={"from_pretrained"}) if model.ae is not None else {}),
            "files": _files(_first(model.ae.from_pretrained if model.ae else None, whole, "vae")),
            **_structure(model.ae),
        },
        "image_encoder": image and {"dtype": image.dtype, "files": _files(image.from_pretrained)},
        "dtype": options.dtype,
        "seed": options.seed,
        "rows": len(dataset),
        "data": [[Path(path).name, Path(path).stat().st_size] for path in _paths(data, options)],
        "preprocess_parameters": data.dataset_param.preprocess_parameters.model_dump(mode="json", exclude=set(_LATER)),
        "text_preprocess_methods": data.dataset_param.text_preprocess_methods
        if data.dataset_param.enable_text_preprocessing
        else [],
    }
    if needs_text:
        described |= {
            f"text_encoder[{n}]": _encoder(model, n, tokenizers)
            for n in range(len(model.text_encoder) or _MOST_ENCODERS)
        }
    return _flat(described)


def _structure(ae: AeConfig | None) -> dict[str, Any]:
    """The structure in model.json of an autoencoder whose weights are a single file."""
    if ae is None or ae.from_pretrained is None or not is_lone_file(Path(ae.from_pretrained)):
        return {}
    return {"structure": ae.structure or None}


def _flat(described: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten to one key for each value, so that a differing one can be named."""
    flat: dict[str, Any] = {}
    for key, value in described.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return flat


def _encoder(model: SoRAModelConfig, number: int, tokenizers: Sequence[str | None]) -> dict[str, Any]:
    described = model.text_encoder[number] if model.text_encoder else TextEncoderConfig()
    ending = "" if number == 0 else f"_{number + 1}"
    directory = _first(described.from_pretrained, model.init_from_diffusers, f"text_encoder{ending}")
    beside = str(Path(directory).parent / f"tokenizer{ending}") if directory is not None else None
    tokenizer = described.tokenizer or (tokenizers[number] if number < len(tokenizers) else None) or beside
    return {
        "dtype": described.dtype,
        "max_length": described.max_length,
        "files": _files(directory),
        "tokenizer": _files(tokenizer),
    }


def _paths(data: GenerationDataConfig, options: argparse.Namespace) -> list[str]:
    basic = data.dataset_param.basic_parameters
    return list(basic.val_data_path or []) if options.validation else list(basic.data_path)


def _first(own: str | None, whole: str | None, name: str) -> str | None:
    return own or (f"{whole}/{name}" if whole else None)


def _files(directory: str | None) -> str | None:
    """A digest of a directory's config.json, and the names and sizes of its files; of a file, its name and size."""
    if directory is None or not Path(directory).exists():
        return None
    directory = str(directory_of(Path(directory)))
    if Path(directory).is_file():
        return hashlib.sha256(f"{Path(directory).name}\0{Path(directory).stat().st_size}".encode()).hexdigest()[:16]
    digest = hashlib.sha256()
    for file in sorted(Path(directory).iterdir()):
        if file.suffix in _WEIGHTS and file.is_file():
            digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
            if file.name == "config.json":
                digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
