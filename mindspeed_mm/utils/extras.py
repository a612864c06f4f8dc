"""Packages that only some runs need: the extras of pyproject.toml, and the message about a missing one."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager

from mindspeed_mm.utils.errors import ConfigError

#: extra → its distributions, each with the module that is imported
EXTRAS: dict[str, dict[str, str]] = {
    "megatron": {"megatron-core": "megatron.core"},
    "generation": {"diffusers": "diffusers", "ftfy": "ftfy"},
    "video": {"av": "av"},
    "audio": {"av": "av"},
    "speech": {"whisper-normalizer": "whisper_normalizer"},
    "lora": {"peft": "peft"},
    "quantization": {"torchao": "torchao"},
    "liger": {"liger-kernel": "liger_kernel"},
    "tables": {"pyarrow": "pyarrow"},
    "plots": {"matplotlib": "matplotlib"},
    "tensorboard": {"tensorboard": "tensorboard"},
    "wandb": {"wandb": "wandb"},
    "swanlab": {"swanlab": "swanlab"},
    "mlflow": {"mlflow-skinny": "mlflow", "sqlalchemy": "sqlalchemy", "alembic": "alembic"},
    "trackio": {"trackio": "trackio"},
    "convert": {"jsonargparse": "jsonargparse"},
    "serve": {
        "fastapi": "fastapi",
        "uvicorn": "uvicorn",
        "openai": "openai",
        "prometheus_client": "prometheus_client",
    },
}


def is_installed(module: str) -> bool:
    """Whether a module can be found; it isn't imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):  # its parent is missing, or it is a stand-in
        return False


def has_extra(extra: str) -> bool:
    """Whether all packages of an extra are installed."""
    return all(map(is_installed, EXTRAS[extra].values()))


def require_extra(extra: str, what: str) -> None:
    """Raise if an extra isn't installed.

    Args:
        extra: A name of `EXTRAS`.
        what: The feature that needs it, and where it was requested: the beginning of the message.

    Raises:
        ConfigError: A package of it isn't installed; the message has the command that installs it.
    """
    missing = [package for package, module in EXTRAS[extra].items() if not is_installed(module)]
    if missing:
        verb = "isn't" if len(missing) == 1 else "aren't"
        raise ConfigError(
            f"{what} needs {' and '.join(missing)}, which {verb} installed; pip install 'mindspeed_mm[{extra}]'"
        )


def require_torchvision(what: str) -> None:
    """Raise without torchvision: the processors of transformers would silently return other pixel values.

    Raises:
        ConfigError: torchvision isn't installed.
    """
    if not is_installed("torchvision"):
        raise ConfigError(
            f"{what} needs torchvision, which isn't installed; install the version that belongs to this torch: "
            "pip install torch torchvision"
        )


def missing_library(error: BaseException) -> str | None:
    """Describe the optional package that transformers or diffusers lacks.

    Args:
        error: Their error.

    Returns:
        A sentence, or None if the error is of another kind.
    """
    found = re.match(r"\s*(\S+) requires (?:the )?(.+?) library(?:,|\.)? (?:but it|But that) was not found", str(error))
    if not isinstance(error, ImportError) or found is None:
        return None
    thing, library = found[1], found[2]
    package = {"pytorch": "torch", "pil": "pillow"}.get(library.lower(), library.lower().replace(" ", "-"))
    return f"{thing} needs {library}, which isn't installed; pip install {package}"


@contextmanager
def missing_library_as_sentence() -> Iterator[None]:
    """Raise a ConfigError for errors that `missing_library` describes; other errors are raised unchanged."""
    try:
        yield
    except ImportError as error:
        sentence = missing_library(error)
        if sentence is None:
            raise
        raise ConfigError(sentence) from error
