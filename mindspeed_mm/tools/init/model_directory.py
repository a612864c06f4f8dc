"""What a model's directory holds, found without torch, and sentences about directories that aren't a model's."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_mm.configs.hf_directory import describe_missing_model
from mindspeed_mm.data.adapter import check_model_path, has_processor
from mindspeed_mm.utils.errors import ConfigError

#: files of a whole diffusers pipeline, and of a model or a part of a pipeline
PIPELINE, CONFIG = "model_index.json", "config.json"
_ADAPTER, _TRACKER = "adapter_config.json", "latest_checkpointed_iteration.txt"
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "diffusion_pytorch_model*.bin")
_NOT_READ = ("*.gguf", "*.ggml", "*.onnx", "*.pth", "*.pt", "*.ckpt", "*.bin", "*.h5", "*.msgpack")
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
_POINTER = b"version https://git-lfs"
_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class ModelDirectory:
    """A model's directory.

    Attributes:
        path: as it was given.
        config: content of config.json; of a pipeline that of its transformer's.
        parameters: number of the weights that are stored; of a pipeline those of its transformer.
        stored_bytes: size of all weight files.
        is_pipeline: a whole diffusers pipeline; else a model of transformers.
        has_weights: whether there are weights to start from.
        has_processor: it reads images, videos or sound by a processor of its own.
        has_template: whether it has a chat template.
    """

    path: str
    config: Mapping[str, Any]
    parameters: int
    stored_bytes: int
    is_pipeline: bool = False
    has_weights: bool = True
    has_processor: bool = False
    has_template: bool = False

    @property
    def model_type(self) -> str:
        """`model_type` of config.json; of a pipeline the class of its transformer."""
        return str(self.config.get("_class_name" if self.is_pipeline else "model_type"))


def read_model_directory(path: str, *, from_scratch: bool = False) -> ModelDirectory:
    """Look into a model's directory.

    Args:
        path: a directory in the hub's layout, or one of a diffusers pipeline.
        from_scratch: whether training begins with random weights, so that none need be there.

    Raises:
        ConfigError: it is no such directory, or parts of it are missing; the message says what it is instead.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(f"--model {_not_a_directory(folder)}")
    if (folder / PIPELINE).is_file():
        return _read_pipeline(folder, from_scratch)
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"--model '{path}' {_without_config(folder)}")
    config = _read(folder / CONFIG)
    if "_class_name" in config:
        whole = folder.parent / PIPELINE
        where = f"; give the whole one: --model {folder.parent}" if whole.is_file() else f", which has a {PIPELINE}"
        raise ConfigError(
            f"--model '{path}' is one part of a diffusers pipeline ({config['_class_name']}); expected the directory "
            f"of the whole pipeline{where}"
        )
    _require_weights(folder, from_scratch)
    check_tokenizer(folder)
    parameters, size = _count(folder, config)
    return ModelDirectory(
        path,
        config,
        parameters,
        size,
        has_weights=size > 0,
        has_processor=has_processor(path),
        has_template=_has_template(folder),
    )


def check_tokenizer(folder: Path) -> None:
    """Refuse a model's directory without a tokenizer.

    Raises:
        ConfigError: with the files that were looked for.
    """
    try:
        check_model_path(str(folder))
    except ConfigError as error:
        what = str(error).partition(": ")[2]
        raise ConfigError(
            f"--model {what}; fetch the model's directory whole (tokenizer and processor files are small)"
        ) from None


def _read_pipeline(folder: Path, from_scratch: bool) -> ModelDirectory:
    transformer = folder / "transformer"
    index = _read(folder / PIPELINE)
    if not (transformer / CONFIG).is_file():
        parts = ", ".join(sorted(entry.name for entry in folder.iterdir() if entry.is_dir())) or "no folder"
        kind = " its denoiser is a UNet, and diffusion transformers are trained here;" if "unet" in index else ""
        raise ConfigError(
            f"--model '{folder}' is a {index.get('_class_name', 'pipeline')} without a folder 'transformer':{kind} "
            f"found {parts}"
        )
    _require_weights(transformer, from_scratch)
    for part in ("vae", "text_encoder"):
        if part in index and (folder / part / CONFIG).is_file():
            _require_weights(folder / part, from_scratch=False)
    config = _read(transformer / CONFIG)
    parameters, _ = _count(transformer, config)
    sizes = [_count(part, {})[1] for part in sorted(folder.iterdir()) if part.is_dir()]
    return ModelDirectory(str(folder), config, parameters, sum(sizes), is_pipeline=True)


def _not_a_directory(path: Path) -> str:
    if not path.exists():
        return describe_missing_model(path)
    if path.suffix == ".gguf":
        return (
            f"'{path}' is a GGUF file, quantised weights for inference, which can't be trained; expected the directory "
            "of the model in the hub's layout (config.json, *.safetensors, tokenizer)"
        )
    beside = f"; did you mean '{path.parent}'?" if (path.parent / CONFIG).is_file() else ""
    return f"'{path}' is a file; expected a model's directory in the hub's layout{beside}"


def _without_config(folder: Path) -> str:
    """What a directory without config.json is."""
    names = sorted(entry.name for entry in folder.iterdir())
    if _ADAPTER in names:
        base = _read(folder / _ADAPTER).get("base_model_name_or_path") or "its base model"
        return (
            f"holds LoRA adapters, which are trained on top of their base model: give --model the directory of {base}, "
            f"with --lora, and name the adapters in the file that is written: lora_load: {folder}"
        )
    if any(name.endswith(".gguf") for name in names):
        return (
            "holds GGUF files, quantised weights for inference, which can't be trained; expected the model's directory "
            "in the hub's layout (config.json, *.safetensors, tokenizer)"
        )
    if _TRACKER in names:
        exported = folder / "hf"
        hint = f"its exported model is '{exported}'" if exported.is_dir() else "export it with mindspeed-mm export"
        return f"is the folder of a run, not of a model; {hint}"
    inner = [place for place in _places_below(folder) if any((place / name).is_file() for name in (CONFIG, PIPELINE))]
    if inner:
        return f"has no {CONFIG}; did you mean '{inner[0]}'?"
    found = ", ".join(names[:8]) + (" …" if len(names) > 8 else "") or "nothing"
    return f"is no model's directory: it has neither {CONFIG} (transformers) nor {PIPELINE} (diffusers); found {found}"


def _places_below(folder: Path) -> list[Path]:
    """Folders in a folder, and in `snapshots` of the hub's cache."""
    folders = [entry for entry in sorted(folder.iterdir()) if entry.is_dir()]
    snapshots = folder / "snapshots"
    return [*(sorted(snapshots.iterdir()) if snapshots.is_dir() else ()), *folders]


def _require_weights(folder: Path, from_scratch: bool) -> None:
    """Refuse a directory whose weights are missing, in part or in another format."""
    files = _weight_files(folder)
    indices = [*folder.glob("*.safetensors.index.json"), *folder.glob("*.bin.index.json")]
    if from_scratch and not files:
        return
    for index in indices:
        wanted = {str(name) for name in (_read(index).get("weight_map") or {}).values()}
        missing = sorted(name for name in wanted if not (folder / name).is_file())
        if missing and len(missing) < len(wanted) + bool(files):
            raise ConfigError(
                f"--model: '{folder}' is incomplete: {index.name} names {len(wanted)} files of weights, and "
                f"{_few(missing)} {'is' if len(missing) == 1 else 'are'} missing; fetch them again"
            )
    if not files:
        others = sorted({file.name for pattern in _NOT_READ for file in folder.glob(pattern)})
        what = f"; what it has can't be read here: {_few(others)}" if others else ""
        raise ConfigError(
            f"--model: '{folder}' has no weights (expected {', '.join(_WEIGHTS[:2])}){what}; fetch them, or write "
            "--from-scratch to begin with random ones"
        )
    for file in files:
        with open(file, "rb") as opened:
            if opened.read(len(_POINTER)) == _POINTER:
                raise ConfigError(f"--model: '{file}' is a pointer of Git LFS, not the weights: git lfs pull")


def _weight_files(folder: Path) -> list[Path]:
    return sorted({file for pattern in _WEIGHTS for file in folder.glob(pattern)})


def _count(folder: Path, config: Mapping[str, Any]) -> tuple[int, int]:
    """Number of stored parameters, and bytes of the weight files, without reading a weight.

    Tensors of safetensors files are counted by the files' headers, those of .bin files by their size.
    """
    from safetensors import SafetensorError, safe_open

    files = _weight_files(folder)
    tensors = [file for file in files if file.suffix == ".safetensors"]
    size = sum(file.stat().st_size for file in tensors or files)
    if not tensors:
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
        return size // _BYTES.get(dtype, 4), size
    parameters = 0
    for file in tensors:
        try:
            with safe_open(file, framework="numpy") as opened:
                parameters += sum(math.prod(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118
        except SafetensorError as error:
            raise ConfigError(f"--model: '{file}' can't be read ({error}); fetch it again") from None
    return parameters, size


def _has_template(folder: Path) -> bool:
    if any((folder / name).exists() for name in _TEMPLATE_FILES):
        return True
    return any(
        _read(folder / name).get("chat_template")
        for name in ("tokenizer_config.json", "processor_config.json")
        if (folder / name).is_file()
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model: {path} can't be read: no valid JSON ({error}); fetch it again") from None
    if not isinstance(content, dict):
        raise ConfigError(f"--model: {path} holds no object; fetch it again")
    return content


def _few(names: Iterable[str], limit: int = 3) -> str:
    names = list(names)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
