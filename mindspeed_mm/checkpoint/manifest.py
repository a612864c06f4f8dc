"""manifest.json of a checkpoint folder: the size and the checksum of each file, and the check against it.

After a full disk, an interrupted copy or a flipped bit a folder may look complete. The manifest detects it, quickly by
sizes or fully by checksums, and names the damaged file.
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
    """The expected size and checksum of a file.

    Attributes:
        size: number of bytes.
        checksum: XXH3 with 128 bits, 32 hexadecimal digits.
    """

    size: int
    checksum: str


def sum_file(path: Path, progress: ReportBytes | None = None) -> FileSum:
    """Compute the size and the checksum of a file, read block by block.

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
    """Return size and checksum of files in `directory`, by name."""
    return {name: sum_file(directory / name) for name in names}


def write_manifest(directory: Path, iteration: int, files: Mapping[str, FileSum]) -> None:
    """Write manifest.json and sync it to disk.

    Args:
        iteration: the step after which the checkpoint was saved.
        files: all other files of the folder.
    """
    entries = {name: {"bytes": files[name].size, ALGORITHM: files[name].checksum} for name in sorted(files)}
    write_json(directory / MANIFEST, {"format": _FORMAT, "iteration": iteration, "files": entries})


def has_manifest(directory: Path) -> bool:
    """Whether a checkpoint has a manifest; those of earlier versions have none."""
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
        a sentence for each problem; empty if there is none. Problems of the manifest itself are returned on every rank.
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
    """Return the names that a rank checks: files from the largest on, each to the rank with the least to read."""
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
    # a name must not lead outside of the folder, whatever the system's path separator is
    if name in ("", ".", "..") or any(c in name for c in "/\\:\0"):
        raise CheckpointError(f"'{manifest}' names the file {name!r}, which is no name in its own folder; refused")
    size = entry.get("bytes") if isinstance(entry, dict) else None
    checksum = entry.get(ALGORITHM) if isinstance(entry, dict) else None
    if not isinstance(size, int) or isinstance(size, bool) or not isinstance(checksum, str):
        raise CheckpointError(f"'{manifest}' lacks 'bytes' or '{ALGORITHM}' of '{name}'; expected a number and a text")
    return FileSum(size, checksum)
