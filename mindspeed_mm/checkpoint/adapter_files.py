"""Adapters in the files of PEFT, diffusers and other programs, and in checkpoints: names, tensors and settings.

Names are PEFT's without the prefix `base_model.model.` (`utils/adapter_names.py`), whatever the file calls them:
inside a model that PEFT has changed (`….lora_A.default.weight`), in diffusers' files (`transformer.….lora_A.weight`),
or in torch_dcp folders, under the prefix of the program that wrote them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from mindspeed_mm.checkpoint.lazy import LazyTensor
from mindspeed_mm.checkpoint.run_folder import describe_older_format, find_checkpoint, has_checkpoint
from mindspeed_mm.checkpoint.sources import BinWeights, DcpWeights, SafetensorsWeights, WeightSource, is_dcp, listing
from mindspeed_mm.checkpoint.start import OF_PIPELINE, PEFT_CONFIG, STATE
from mindspeed_mm.utils.adapter_names import is_adapter, stored_name
from mindspeed_mm.utils.errors import CheckpointError
from mindspeed_mm.utils.files import fsync_path

WEIGHTS = "adapter_model.safetensors"
#: key of the header of diffusers' file: the settings of the adapters
_HEADER = "lora_adapter_metadata"
#: what PEFT puts before a model's names
OF_PEFT = "base_model.model."
_TRANSFORMER = "transformer."
#: of adapter_config.json, what diffusers' LoraConfig(**settings) has no use for
_NO_SETTINGS = ("base_model_name_or_path", "inference_mode", "task_type")
_FILES = (WEIGHTS, "adapter_model.bin", OF_PIPELINE, "pytorch_lora_weights.bin")
#: what the programs that write adapters put before a model's names
_PREFIXES = tuple(
    outer + inner
    for outer in ("", "base_model.model.", "model.base_model.model.", "module.", "transformer.", "transformer_2.")
    for inner in ("", "model.")
)


@dataclass(frozen=True)
class AdapterFiles:
    """Stored adapters.

    Attributes:
        path: file or directory, for messages.
        config: content of adapter_config.json; {}: nothing says the settings.
        tensors: adapters and what was trained whole beside them, as the files name them.
        scaling: the factor on the adapters' output, where the kind of file says it, and no settings do; else None.
    """

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, LazyTensor]
    scaling: float | None = None

    def named(self, is_known: Callable[[str], bool]) -> dict[str, LazyTensor]:
        """Return the tensors by PEFT's names without its prefix.

        Args:
            is_known: whether a name is one of the model; the prefix is dropped under which most names are.
        """
        # PEFT also writes the weights of embeddings with adapters, and tells them apart by `base_layer`
        names = {name: stored_name(name) if is_adapter(name) else name for name in self.tensors}
        fits = {p: sum(n.startswith(p) and is_known(n.removeprefix(p)) for n in names.values()) for p in _PREFIXES}
        prefix = max(_PREFIXES, key=lambda p: (fits[p], -len(p)))
        return {stored.removeprefix(prefix): self.tensors[name] for name, stored in names.items()}


def open_adapters(path: Path, *, allow_pickle: bool = False, averaged: bool = False) -> AdapterFiles:
    """Open a PEFT directory, a directory or file of diffusers, another file of adapters, or a checkpoint of adapters.

    Args:
        path: of a run folder, its newest checkpoint is taken.
        allow_pickle: see `open_weights`.
        averaged: of a checkpoint, take the averages (--ema-decay).

    Raises:
        CheckpointError: there are no adapters, or no averaged ones, or they can't be read.
    """
    if path.is_dir() and has_checkpoint(path):
        path = find_checkpoint(path).directory
    if is_dcp(path):
        return _of_checkpoint(path, averaged)
    file = path if path.is_file() else _file_in(path)
    config = _settings_beside(file, path)
    source: WeightSource
    if file.suffix == ".safetensors":
        source = SafetensorsWeights(path, [file])
        config = config or _settings_in(file)
    else:
        source = BinWeights(path, [file], allow_pickle=allow_pickle)
    tensors = source.tensors()
    # without settings, diffusers takes alpha for the rank: `get_peft_kwargs` in its peft_utils
    of_pipeline = not config and any(name.startswith(_TRANSFORMER) for name in tensors)
    return _checked(AdapterFiles(path, config, tensors, 1.0 if of_pipeline else None))


def write_pipeline_adapters(directory: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> None:
    """Write pytorch_lora_weights.safetensors, which diffusers' pipelines and transformers load.

    The transformer's prefix is that of all experts: `load_into_transformer_2` says which one is meant. Source:
    `WanLoraLoaderMixin` and `PeftAdapterMixin.load_lora_adapter` of diffusers.

    Args:
        tensors: of adapters alone, by PEFT's names without its prefix.
        config: content of adapter_config.json.
    """
    settings = {f"{_TRANSFORMER}{key}": value for key, value in config.items() if key not in _NO_SETTINGS}
    header = {"format": "pt", _HEADER: json.dumps(settings, indent=2, sort_keys=True)}
    values = {_TRANSFORMER + name: value.contiguous().clone() for name, value in tensors.items()}
    save_file(values, directory / OF_PIPELINE, metadata=header)
    fsync_path(directory / OF_PIPELINE)


def holds_adapters(path: Path) -> bool:
    """Whether a place is one that `open_adapters` opens."""
    try:
        open_adapters(path)
    except CheckpointError:
        return False
    return True


def holds_only_adapters(path: Path) -> bool:
    """Whether a place is a torch_dcp folder with the tensors of adapters, and no others of a model."""
    return is_dcp(path) and all(map(is_adapter, DcpWeights(path).tensors()))


def _of_checkpoint(path: Path, averaged: bool) -> AdapterFiles:
    state: dict[str, Any] = {}
    if (path / STATE).is_file():
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
    return _checked(AdapterFiles(path, state.get("lora") or {}, DcpWeights(path, averaged=averaged).tensors()))


def _checked(found: AdapterFiles) -> AdapterFiles:
    if any(map(is_adapter, found.tensors)):
        return found
    some = ", ".join(sorted(found.tensors)[:3])
    raise CheckpointError(f"'{found.path}' holds no adapters of LoRA (names with lora_A and lora_B), but {some}, …")


def _file_in(path: Path) -> Path:
    for name in _FILES:
        if (path / name).is_file():
            return path / name
    others = sorted(path.glob("*.safetensors"), key=lambda file: (len(file.name), file.name)) if path.is_dir() else []
    numbered = [file for file in others if file.name.startswith("lora_adapter")]
    if numbered or len(others) == 1:
        return (numbered or others)[-1]
    raise CheckpointError(
        f"'{path}' holds no adapters: expected a PEFT directory ({PEFT_CONFIG} and {WEIGHTS}), {OF_PIPELINE}, another "
        f"file of adapters, or a checkpoint of adapters; it holds {listing(path)}" + describe_older_format(path)
    )


def _settings_beside(file: Path, path: Path) -> dict[str, Any]:
    """Return the content of adapter_config.json beside a file; {}: there is none."""
    place = file.parent / PEFT_CONFIG
    if not place.is_file():
        return {}
    try:
        content = json.loads(place.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"'{place}' can't be read: {error}") from error
    kind = content.get("peft_type") if isinstance(content, dict) else None
    if kind != "LORA":
        raise CheckpointError(f"'{place}': peft_type is {kind!r}; expected LORA")
    return dict(content)


def _settings_in(file: Path) -> dict[str, Any]:
    """Return the settings in the header of a file of diffusers, without the name of the part."""
    try:
        with safe_open(file, framework="pt") as opened:
            header = (opened.metadata() or {}).get(_HEADER)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"'{file}' is damaged or no safetensors file: {error}; fetch it again") from error
    content = json.loads(header) if header else {}
    return {key.partition(".")[2] if key.startswith("transformer") else key: v for key, v in content.items()}
