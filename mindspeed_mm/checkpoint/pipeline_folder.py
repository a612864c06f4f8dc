"""Directories of whole diffusers pipelines: model_index.json and a folder for each component."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mindspeed_mm.checkpoint.sources import listing
from mindspeed_mm.models.common.pipeline_layout import INDEX, PipelineLayout
from mindspeed_mm.utils.errors import CheckpointError
from mindspeed_mm.utils.files import fsync_path

# weights in other formats, which are not copied if a folder has safetensors
_OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf")


def is_pipeline(directory: Path) -> bool:
    """Whether `directory` contains a whole pipeline."""
    return (directory / INDEX).is_file()


def component_directory(directory: Path, class_name: str) -> Path:
    """Return the folder of a model's class in a pipeline's directory; `directory` itself if it is no pipeline.

    Raises:
        CheckpointError: model_index.json can't be read, or names no component of this class, or several.
    """
    if not is_pipeline(directory):
        return directory
    parts = _classes(directory)
    found = [name for name, part in parts.items() if part == class_name and (directory / name).is_dir()]
    if len(found) == 1:
        return directory / found[0]
    if found:
        raise CheckpointError(
            f"'{directory / INDEX}' names {len(found)} parts of class {class_name}: {', '.join(found)}; name the "
            f"folder of one of them, such as '{directory / found[0]}'"
        )
    raise CheckpointError(
        f"'{directory / INDEX}' names no part of class {class_name} with a folder; it names "
        f"{', '.join(f'{name} ({part})' for name, part in parts.items()) or 'none'}; the directory holds "
        f"{listing(directory)}"
    )


def copy_parts(layout: PipelineLayout, target: Path, rank: int, size: int) -> None:
    """Copy the files of the other components, each rank a part of them, and write model_index.json on rank 0.

    Links are copied as regular files.

    Raises:
        CheckpointError: a component has no directory.
    """
    files = [(name, path) for name, source in sorted(layout.others.items()) for path in _files_of(name, source)]
    for name, path in files[rank::size]:
        copy = target / name / path.relative_to(layout.others[name])
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
        fsync_path(copy)
    if rank == 0:
        text = json.dumps(layout.model_index, indent=2) + "\n"
        (target / INDEX).write_text(text, encoding="utf-8")
        fsync_path(target / INDEX)


def size_in_words(directory: Path) -> str:
    """Return the size of each folder in a directory (or of itself, if it has none), for a log line."""
    folders = sorted(p for p in directory.iterdir() if p.is_dir())
    if not folders:
        return _words(_bytes_of(directory))
    return ", ".join(f"{folder.name} {_words(_bytes_of(folder))}" for folder in folders)


def _classes(directory: Path) -> dict[str, str]:
    """Return the class of each component in model_index.json."""
    try:
        content: dict[str, Any] = json.loads((directory / INDEX).read_text(encoding="utf-8"))
        parts = {name: part for name, part in content.items() if isinstance(part, list) and len(part) == 2}
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"'{directory / INDEX}' can't be read ({error}); expected a pipeline's parts") from error
    return {name: part[1] for name, part in parts.items() if isinstance(part[1], str)}


def _files_of(name: str, source: Path) -> Iterator[Path]:
    if not source.is_dir():
        raise CheckpointError(f"the pipeline's part '{name}' can't be copied: '{source}' is no directory")
    has_safetensors = any(source.glob("*.safetensors"))
    for path in sorted(source.rglob("*")):
        is_hidden = any(part.startswith(".") for part in path.relative_to(source).parts)
        if path.is_file() and not is_hidden and not (has_safetensors and path.name.endswith(_OTHER_FORMATS)):
            yield path


def _bytes_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def _words(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
