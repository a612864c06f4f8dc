"""Folders that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from mindspeed_mm.utils.files import exchange, fsync_path

# suffixes of weight files, which are not copied with the other files of a HF directory
_OF_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")


def working_folder(directory: Path) -> Path:
    """Return the hidden folder that is written before it takes the place of `directory`."""
    return directory.with_name(f".{directory.name}.saving")


def make_empty(working: Path, inside: Path) -> None:
    """Make the empty folder `inside` of a new folder `working`."""
    shutil.rmtree(working, ignore_errors=True)
    inside.mkdir(parents=True)


def replace_folder(working: Path, final: Path) -> None:
    """Replace the old folder with the new one; other processes may have files of the old one mapped."""
    if final.exists() and not exchange(working, final):
        aside = final.with_name(f".{final.name}.replaced")
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(final, aside)
        os.replace(working, final)
        shutil.rmtree(aside, ignore_errors=True)
    elif working.exists() and final.exists():
        shutil.rmtree(working, ignore_errors=True)
    else:
        os.replace(working, final)
    fsync_path(final.parent)


def copy_small_files(source: Path, target: Path) -> None:
    """Copy the files of a HF directory but config.json and the weights: tokenizer, processor, templates."""
    for path in sorted(source.iterdir()):
        is_of_weights = path.name.endswith(_OF_WEIGHTS) or ".index." in path.name
        if path.is_file() and not is_of_weights and path.name not in ("config.json", "adapter_config.json"):
            shutil.copy2(path, target / path.name)


def sync_files(folder: Path) -> None:
    """Sync the files of a folder that aren't weights, whose writers sync them themselves."""
    for path in folder.iterdir():
        if path.suffix != ".safetensors" and path.is_file():
            fsync_path(path)
