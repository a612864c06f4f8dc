"""An autoencoder whose weights are named as one file, as published model.json files do it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mindspeed_mm.configs.sora_config import AeConfig, config_beside
from mindspeed_mm.utils.errors import CheckpointError, ConfigError

#: name in the authors' configuration → parameter of the diffusers class
_PUBLISHED = {"ffactor_spatial": "spatial_compression_ratio", "ffactor_temporal": "temporal_compression_ratio"}
_USUAL = "diffusion_pytorch_model.safetensors"


def is_lone_file(path: Path) -> bool:
    """Whether a file of weights has to be read by itself: diffusers reads the other ones with their directory."""
    return path.is_file() and not (path.name == _USUAL and config_beside(path))


def directory_of(path: Path) -> Path:
    """Return the directory of a file that diffusers reads with it; other paths as they are."""
    return path.parent if path.is_file() and not is_lone_file(path) else path


def class_and_structure(
    path: Path, config: AeConfig, named: str | None, default_class: str, file: str
) -> tuple[str, dict[str, Any]]:
    """Return the diffusers class of a lone file and the arguments of its constructor.

    A config.json beside the file states both; else model.json states them, under diffusers' names or the authors', and
    the class's defaults hold for the rest.

    Args:
        named: class named by `ae.model_id`.
        default_class: class of the predictor's family.

    Raises:
        ConfigError: the class isn't stated anywhere, or the class has no such argument.
    """
    import diffusers

    if stated := config_beside(path):
        return str(stated["_class_name"]), {k: v for k, v in stated.items() if not k.startswith("_")}
    name = named or default_class
    if not name:
        raise ConfigError(
            f"{file}: 'ae.from_pretrained' '{path}' is a file without a diffusers config.json beside it; name its "
            "class as 'ae.model_id', or the diffusers directory of the autoencoder as 'ae.from_pretrained'"
        )
    known = inspect.signature(getattr(diffusers, name).__init__).parameters
    given = {key: value for key, value in config.structure.items() if value is not None}
    if unknown := [key for key in given if _PUBLISHED.get(key, key) not in known]:
        keys = ", ".join(f"'ae.{key}'" for key in unknown)
        raise ConfigError(
            f"{file}: {keys}: {name} has no such argument; remove what belongs to "
            "another class, or name the diffusers directory of the autoencoder as 'ae.from_pretrained'"
        )
    return name, {_PUBLISHED.get(key, key): value for key, value in given.items()}


def load_file(path: Path, model_class: Any, structure: Mapping[str, Any], file: str) -> Any:
    """Build a diffusers model and fill it from a file, in the file's dtype.

    Raises:
        CheckpointError: the file is damaged, or its tensors are not those of the class.
    """
    from safetensors import SafetensorError, safe_open

    with torch.device("meta"):
        model = model_class(**structure)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    try:
        with safe_open(str(path), framework="pt") as opened:
            found = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
            problem = _difference(expected, found)
            if problem:
                raise CheckpointError(
                    f"{file}: 'ae.from_pretrained' '{path}' doesn't fit {model_class.__name__}: {problem}; a file in "
                    "the layout of the model's authors is not read: name the folder vae of the model's diffusers "
                    "repository"
                )
            tensors = {name: opened.get_tensor(name) for name in expected}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: 'ae.from_pretrained' '{path}' can't be read: {error}") from error
    model = model_class(**structure)  # anew: what it computes by itself has no values on meta
    model.load_state_dict(tensors, strict=True, assign=True)
    return model


def _difference(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> str | None:
    missing, left_over = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or left_over:
        parts = [f"{len(names)} tensors are {what} (such as {names[0]})" for names, what in
                 ((missing, "missing"), (left_over, "left over")) if names]  # fmt: skip
        return ", ".join(parts)
    for name, shape in expected.items():
        if found[name] != shape:
            return f"{name} has the shape {list(found[name])}, and {list(shape)} in the class"
    return None
