"""The versions of other packages that a run needs, and why; read from package metadata, without importing."""

from __future__ import annotations

import importlib.metadata
import os
import re

from mindspeed_mm.utils.errors import ConfigError

# package → lowest release, and the reason for it
MINIMUM = {
    "torch": ("2.8", "FSDP2 sums gradients over ranks through calls that came with it"),
    "transformers": ("5.17", "models and processors were tested on none before it"),
}


def version_faults() -> list[str]:
    """Return a sentence for each installed package that is too old, or built for another torch."""
    sentences = [require_at_least(name, lowest, why) for name, (lowest, why) in MINIMUM.items()]
    # each is built for one release of torch, which its metadata names
    built = ["torchvision", "torch_npu"] if loads_torch_npu() else ["torchvision"]
    return [s for s in (*sentences, *map(built_for_another_torch, built)) if s is not None]


def check_versions() -> None:
    """Raise for versions with which a run would fail later, inside another library.

    Raises:
        ConfigError: names the installed and the needed version, and the reason.
    """
    faults = version_faults()
    if faults:
        raise ConfigError("; ".join(faults))


def require_at_least(name: str, lowest: str, why: str) -> str | None:
    """Return a sentence if package `name` is installed and older than `lowest`."""
    found = installed_version(name)
    if found is None or release(found) >= release(lowest):
        return None
    return f"{name} {found} is installed and {name} >= {lowest} is needed: {why}; pip install '{name}>={lowest}'"


def require_release(what: str, name: str, lowest: str, why: str) -> None:
    """Raise if a feature needs a newer release of a package than is installed.

    Args:
        what: The feature: the beginning of the message.

    Raises:
        ConfigError: Package `name` is older than `lowest`; names both versions, and the reason.
    """
    sentence = require_at_least(name, lowest, why)
    if sentence is not None:
        raise ConfigError(f"{what}: {sentence}")


def built_for_another_torch(name: str) -> str | None:
    """Return a sentence if package `name` is installed and states that it needs exactly another release of torch."""
    found, torch = installed_version(name), installed_version("torch")
    if found is None or torch is None:
        return None
    for requirement in importlib.metadata.requires(name) or ():
        exact = re.match(r"torch\s*\(?==\s*([\w.+]+?)(\.\*)?\)?\s*(;|$)", requirement)
        if exact is None or "extra" in requirement:
            continue
        wanted = exact[1].split("+")[0]
        have = torch.split("+")[0]
        if release(have) != release(wanted) and not (exact[2] and have.startswith(wanted + ".")):
            return (
                f"{name} {found} is built for torch {wanted} and torch {torch} is installed, so that neither would run "
                f"right; install a pair, for example pip install torch=={wanted} {name}=={found}"
            )
    return None


def loads_torch_npu() -> bool:
    """Whether torch_npu is installed and `import torch` loads it."""
    autoload = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "0"
    return autoload and installed_version("torch_npu") is not None


def installed_version(name: str) -> str | None:
    """Return the version of an installed package; None: it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def release(version: str) -> tuple[int, ...]:
    """Return the numbers at the beginning of a version, without zeros at the end: "2.10.0+cu130" → (2, 10)."""
    numbers = [int(part) for part in re.match(r"\d*(?:\.\d+)*", version)[0].split(".") if part]  # type: ignore[index]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


#: the tested set's versions of what decides on numbers, as constraints.txt has them
TESTED: dict[str, str] = {
    "torch": "2.14.1",
    "torchvision": "0.29.1",
    "transformers": "5.24.0",
    "diffusers": "0.42.1",
    "peft": "0.21.2",
    "torchao": "0.18.0",
    "megatron-core": "0.16.1",
    "numpy": "2.4.6",
    "safetensors": "0.8.0",
    "pyarrow": "26.0.1",
    "pillow": "12.3.0",
    "av": "18.1.0",
}
