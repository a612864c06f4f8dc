"""manifest.json of a checkpoint folder: the size and the checksum of each of its files, and the check against it.

A full disk, a copy that broke off or a flipped bit leave a folder that looks whole. With the manifest it can be told
from one that is, by size in no time or by content, and the file that is damaged has a name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from mindspeed_mm.utils.errors import CheckpointError
from mindspeed_mm.utils.files import write_json

MANIFEST = "manifest.json"
ALGORITHM = "xxh3_128"
_FORMAT = 1
_BLOCK = 8 << 20

ReportBytes = Callable[[int], None]


@dataclass(frozen=True)
class FileSum:
    """What a file must be.

    Attributes:
        size: bytes.
        checksum: XXH3 with 128 bits, 32 hexadecimal digits.
    """

    size: int
    checksum: str


def sum_file(path: Path, progress: ReportBytes | None = None) -> FileSum:
    """Read a file block by block.

    Args:
        progress: called with the number of bytes of each block.
    """
    digest, size = xxhash.xxh3_128(), 0
    buffer = memoryview(bytearray(_BLOCK))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
            if progress is not None:
                progress(count)
    return FileSum(size, digest.hexdigest())


def sum_files(directory: Path, names: Iterable[str]) -> dict[str, FileSum]:
    """Sums of files in `directory`, by name."""
    return {name: sum_file(directory / name) for name in names}


def write_manifest(directory: Path, iteration: int, files: Mapping[str, FileSum]) -> None:
    """Write manifest.json, durably.

    Args:
        iteration: the step after which the checkpoint was taken.
        files: every other file of the folder.
    """
    entries = {name: {"bytes": files[name].size, ALGORITHM: files[name].checksum} for name in sorted(files)}
    write_json(directory / MANIFEST, {"format": _FORMAT, "iteration": iteration, "files": entries})


def has_manifest(directory: Path) -> bool:
    """Whether a checkpoint can be verified; folders that earlier versions wrote can't."""
    return (directory / MANIFEST).is_file()


def read_manifest(directory: Path) -> dict[str, FileSum]:
    """Read the sums of a checkpoint's files, by name.

    Raises:
        CheckpointError: manifest.json can't be read, lacks a key, or names a file outside the folder.
    """
    path = directory / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"'{path}' can't be read ({error}); the checkpoint can't be verified") from error
    if not isinstance(content, dict) or not isinstance(content.get("files"), dict):
        raise CheckpointError(f"'{path}' has no 'files'; expected an object of file names, sizes and checksums")
    if content.get("format") != _FORMAT:
        raise CheckpointError(f"'{path}' has format {content.get('format')!r}; expected {_FORMAT}")
    return {name: _file_sum(path, name, entry) for name, entry in content["files"].items()}


def manifest_problems(
    directory: Path, rank: int = 0, size: int = 1, *, checksums: bool = True, progress: ReportBytes | None = None
) -> list[str]:
    """Check the files of a checkpoint against its manifest; the ranks share the reading.

    Args:
        rank, size: this rank checks its share of the files; 0, 1: all of them.
        checksums: read the files; False: look at their sizes only.
        progress: called with the number of bytes of each block that was read.

    Returns:
        a sentence for each problem, empty if there is none. What is wrong with the manifest itself every rank says.
    """
    try:
        files = read_manifest(directory)
    except CheckpointError as error:
        return [str(error)]
    problems = []
    for name in _share(files, rank, size):
        problem = _compare(directory / name, files[name], checksums, progress)
        if problem:
            problems.append(problem)
    return problems


def _share(files: Mapping[str, FileSum], rank: int, size: int) -> list[str]:
    """Names that a rank checks: the largest file first, each to the rank that has least to read."""
    load = [0] * size
    mine = []
    for name in sorted(files, key=lambda n: (-files[n].size, n)):
        chosen = load.index(min(load))
        load[chosen] += files[name].size
        if chosen == rank:
            mine.append(name)
    return mine


def _compare(path: Path, expected: FileSum, checksums: bool, progress: ReportBytes | None) -> str | None:
    try:
        size = path.stat().st_size
        if size != expected.size:
            return f"'{path}' holds {size} bytes; expected {expected.size}"
        found = sum_file(path, progress) if checksums else expected
    except FileNotFoundError:
        return f"'{path}' is missing; expected a file of {expected.size} bytes"
    except OSError as error:
        return f"'{path}' can't be read ({error.strerror or error}); expected a file of {expected.size} bytes"
    if found.checksum != expected.checksum:
        return f"'{path}' has the checksum {found.checksum}; expected {expected.checksum}: its content has changed"
    return None


def _file_sum(manifest: Path, name: str, entry: Any) -> FileSum:
    # a name is followed into the folder and nowhere else, whatever the system takes for a separator
    if name in ("", ".", "..") or any(c in name for c in "/\\:\0"):
        raise CheckpointError(f"'{manifest}' names the file {name!r}, which is no name in its own folder; refused")
    size = entry.get("bytes") if isinstance(entry, dict) else None
    checksum = entry.get(ALGORITHM) if isinstance(entry, dict) else None
    if not isinstance(size, int) or isinstance(size, bool) or not isinstance(checksum, str):
        raise CheckpointError(f"'{manifest}' lacks 'bytes' or '{ALGORITHM}' of '{name}'; expected a number and a text")
    return FileSum(size, checksum)
