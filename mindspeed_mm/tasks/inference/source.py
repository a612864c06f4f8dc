"""Find configuration, weights and processor of a model, wherever it comes from; nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mindspeed_mm.checkpoint.run_folder import (
    CheckpointStep,
    checkpoints,
    describe_older_format,
    find_checkpoint,
    has_checkpoint,
)
from mindspeed_mm.configs.hf_directory import describe_missing_model
from mindspeed_mm.utils.errors import CheckpointError, ConfigError
from mindspeed_mm.utils.files import read_object

_METADATA, _STATE, _ADAPTER = ".metadata", "state.json", "adapter_config.json"
_ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")
_PROCESSOR = (
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model"),
)


@dataclass(frozen=True)
class ModelSource:
    """Where the parts of a model are.

    Attributes:
        config: directory of config.json and generation_config.json.
        weights: HF directory or torch_dcp folder.
        processor: directory of the processor, or of the tokenizer of a text model.
        adapter: directory of a PEFT adapter for these weights; None: there is none.
        named_by: flag or key that named the model, for messages.
    """

    config: Path
    weights: Path
    processor: Path
    adapter: Path | None = None
    named_by: str = "--load"


def find_model(
    place: str | Path,
    *,
    step: CheckpointStep | None = None,
    beside: str | Path | None = None,
    named_by: str = "--load",
    complete: bool = True,
) -> ModelSource:
    """Find the parts of a model.

    Args:
        place: a HF directory or an export; a run folder, of which the checkpoint that its tracker names counts, else
            its export `hf`; a checkpoint in it (`iter_0000100`, `release`); or the directory of a PEFT adapter, whose
            base is any of the others.
        step: iteration of a run folder, or "best"; None: the newest.
        beside: HF directory of the files that `place` lacks; None: the one that a run started from, as its checkpoint
            remembers.
        named_by: flag or key that named `place`, for messages.
        complete: whether weights and a tokenizer must be there; False: config.json is enough.

    Raises:
        CheckpointError: `place` doesn't exist, or holds no model.
        ConfigError: nothing says where configuration or processor are.
    """
    path = Path(place)
    if not path.is_dir():
        raise CheckpointError(f"{named_by}: {describe_missing_model(place)}")
    if (path / _ADAPTER).is_file():
        content = read_object(path / _ADAPTER)
        return _find_base(path, content, str(path / _ADAPTER), beside, named_by)
    has_config = _model_type(path) is not None
    directory = path if has_config and not complete else _weights_of(path, step, named_by)
    state = read_object(directory / _STATE)
    if isinstance(adapter := state.get("lora"), dict):
        where = f"{directory / _STATE}: lora"
        return _find_base(
            directory, {"base_model_name_or_path": state.get("source"), **adapter}, where, beside, named_by
        )
    candidates = [directory, *_remembered(directory), *([Path(beside)] if beside else [])]
    config = next((c for c in candidates if _model_type(c) is not None), None)
    if config is None:
        began = next(iter(_remembered(directory)), None)
        where = f"'{began}', which its run started from, is not there" if began else "it doesn't say where it began"
        raise ConfigError(
            f"{named_by}: '{directory}' holds no config.json and {where}; give --processor-path, the HF directory of "
            "the model"
        )
    processor = next((c for c in (candidates[-1], *candidates) if _has_processor(c)), None)
    if processor is None and not complete:
        processor = candidates[-1]
    if processor is None:
        raise ConfigError(
            f"{named_by}: '{directory}' holds neither a processor nor a tokenizer; give --processor-path, the HF "
            "directory that has it"
        )
    return ModelSource(config, directory, processor, named_by=named_by)


def _weights_of(path: Path, step: CheckpointStep | None, named_by: str) -> Path:
    if has_checkpoint(path) or (step is not None and checkpoints(path)):
        return find_checkpoint(path, step).directory
    if step is not None:
        raise CheckpointError(f"--ckpt-step {step}: {named_by} '{path}' holds no checkpoint; it holds {_listing(path)}")
    if (path / _METADATA).is_file() or any(any(path.glob(pattern)) for pattern in _WEIGHTS):
        return path
    if _model_type(path / "hf") is not None:
        return path / "hf"
    raise CheckpointError(
        f"{named_by} '{path}' holds no model: neither weights (a HF directory), nor .metadata (a torch_dcp "
        f"checkpoint), nor a run's checkpoints or its hf; it holds {_listing(path)}{describe_older_format(path)}"
    )


def _find_base(
    adapter: Path, content: Mapping[str, Any], where: str, beside: str | Path | None, named_by: str
) -> ModelSource:
    """Find the base model of an adapter.

    Args:
        adapter: a PEFT directory, or a checkpoint of a run with LoRA.
        content: of adapter_config.json.
        where: where that stands, for messages.
    """
    base = content.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ConfigError(f"{where}: 'base_model_name_or_path' is {base!r}; expected the directory of the base model")
    is_checkpoint = (adapter / _METADATA).is_file()
    if not is_checkpoint and not any((adapter / name).is_file() for name in _ADAPTER_WEIGHTS):
        raise CheckpointError(f"{named_by}: '{adapter}' holds no {_ADAPTER_WEIGHTS[0]}; it holds {_listing(adapter)}")
    places = [Path(base), adapter / base, *([Path(beside)] if beside else [])]
    place = next((place for place in places if place.is_dir()), None)
    if place is None:
        raise ConfigError(f"{where}: 'base_model_name_or_path': {describe_missing_model(base)}")
    found = find_model(place, beside=beside, named_by=f"{where}: base_model_name_or_path")
    own = adapter if not beside and _has_processor(adapter) else found.processor
    return replace(found, adapter=adapter, processor=own)


def _remembered(directory: Path) -> list[Path]:
    """The HF directory that a checkpoint's run started from."""
    source = read_object(directory / _STATE).get("source")
    return [Path(source)] if isinstance(source, str) and source else []


def _model_type(directory: Path) -> str | None:
    return read_object(directory / "config.json").get("model_type")


def _has_processor(directory: Path) -> bool:
    return any((directory / name).is_file() for name in _PROCESSOR)


def _listing(path: Path) -> str:
    names = sorted(p.name for p in path.iterdir() if not p.name.startswith("."))
    return ", ".join(names[:8]) + (" …" if len(names) > 8 else "") if names else "nothing"
