"""Show the content of a checkpoint or a HF directory, and verify that it is complete."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_mm.configs.hf_directory import describe_missing_model
from mindspeed_mm.utils.errors import CheckpointError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class _Entry:
    shape: tuple[int, ...]
    dtype: str
    size: int


def info(directory: str, all: bool = False) -> int:
    """Print the content of a run folder, a checkpoint or a HF directory.

    Args:
        directory: the folder.
        all: list every tensor; without it, layers with the same shapes share a line.
    """
    from mindspeed_mm.checkpoint.best import read_best
    from mindspeed_mm.checkpoint.run_folder import TRACKER, checkpoints, find_checkpoint, has_checkpoint
    from mindspeed_mm.checkpoint.sources import is_dcp

    path = Path(directory)
    if has_checkpoint(path) or checkpoints(path):
        tracker = path / TRACKER
        latest = tracker.read_text(encoding="utf-8").strip() if tracker.is_file() else None
        print(f"{path}: run folder, latest: {latest or 'unknown (no ' + TRACKER + ')'}")
        try:
            best = read_best(path)
        except CheckpointError as error:
            best = None
            print(f"  {error}")
        for found in checkpoints(path):
            note = f"  best: {best.metric} {best.value:g}" if best and best.iteration == found.iteration else ""
            print(f"  {found.directory.name}  {size_words(_folder_bytes(found.directory))}{note}")
        try:
            path = find_checkpoint(path).directory
        except CheckpointError as error:
            print(f"  {error}")
            return 0
    if is_dcp(path):
        _print_dcp(path, every=all)
    else:
        _print_hub(path, every=all)
    return 0


def verify_weights(directory: str) -> int:
    """Check that a checkpoint or a HF directory is complete: no file missing, truncated or changed.

    Args:
        directory: a checkpoint folder, a run folder (all of its checkpoints) or a HF directory.
    """
    from mindspeed_mm.checkpoint.run_folder import find_checkpoint, has_checkpoint
    from mindspeed_mm.checkpoint.sources import has_weight_files, is_dcp

    path = Path(directory)
    # those without .metadata too, which runs pass over
    folders = [p for p in (path / "release", *sorted(path.glob("iter_*"))) if p.is_dir()]
    status = 0
    if has_checkpoint(path):
        try:
            find_checkpoint(path)
        except CheckpointError as error:
            print(f"problem: {error}")
            status = 1
    for folder in folders or [path]:
        if not folder.is_dir():
            raise CheckpointError(f"{describe_missing_model(folder)}; expected a directory")
        if not is_dcp(folder) and not has_weight_files(folder) and not (folder / "manifest.json").is_file():
            problems, how = [_unknown(folder)], "no .metadata, manifest.json or weight files"
            if not folders:
                raise CheckpointError(problems[0])
        else:
            problems, how = _problems(folder)
        for problem in problems:
            print(f"problem: {problem}")
        print(f"{folder}: {f'{len(problems)} problems' if problems else 'whole'} ({how})")
        status = 1 if problems else status
    return status


def _problems(folder: Path) -> tuple[list[str], str]:
    from mindspeed_mm.checkpoint import manifest
    from mindspeed_mm.checkpoint.sources import SafetensorsWeights, is_dcp, open_weights, shown

    if manifest.has_manifest(folder):
        with progress_bar(str(folder), _folder_bytes(folder)) as advance:
            return manifest.manifest_problems(folder, progress=advance), "sizes and checksums of manifest.json"
    if is_dcp(folder):
        return _dcp_problems(folder), "no manifest.json: files are there and long enough"
    try:
        source = open_weights(folder)
        count = len(source.tensors())
    except CheckpointError as error:
        return [str(error)], "headers and index"
    if isinstance(source, SafetensorsWeights) and source.absent:
        return [
            f"the index of '{folder}' lists weights that no file holds: {shown(source.absent)}"
        ], "headers and index"
    return [], f"headers and index agree, {count} tensors; these files carry no checksums"


def _unknown(folder: Path) -> str:
    from mindspeed_mm.checkpoint.sources import listing

    return f"'{folder}' is neither a torch_dcp checkpoint nor a HF directory; it holds {listing(folder)}"


def _dcp_problems(folder: Path) -> list[str]:
    from mindspeed_mm.checkpoint.dcp_reader import read_metadata

    try:
        metadata = read_metadata(folder)
    except CheckpointError as error:
        return [str(error)]
    needed: dict[str, int] = {}
    for place in (metadata.storage_data or {}).values():
        needed[place.relative_path] = max(needed.get(place.relative_path, 0), place.offset + place.length)
    problems = []
    for name, size in sorted(needed.items()):
        file = folder / name
        if not file.is_file():
            problems.append(f"'{file}' is missing; expected at least {size} bytes")
        elif file.stat().st_size < size:
            problems.append(f"'{file}' holds {file.stat().st_size} bytes; expected at least {size}")
    return problems


def _print_dcp(path: Path, *, every: bool) -> None:
    from mindspeed_mm.checkpoint.dcp_reader import DcpReader

    reader = DcpReader(path)
    state = json.loads((path / "state.json").read_text(encoding="utf-8")) if (path / "state.json").is_file() else {}
    print(f"{path}: torch_dcp checkpoint, {size_words(_folder_bytes(path))}")
    for key in ("iteration", "consumed_samples", "consumed_tokens", "world_size", "source"):
        if key in state:
            print(f"  {key}: {state[key]}")
    if not state:
        print("  weights only (no state.json)")
    entries = {name: _entry(reader.shape(name), reader.dtype(name)) for name in reader.tensors}
    weights = {n: e for n, e in entries.items() if not n.startswith("optimizer.")}
    others = {n: e for n, e in entries.items() if n not in weights}
    _print_tensors("weights", weights, every=every)
    if others:
        _print_tensors("optimizer", others, every=every)
    if reader.other_keys:
        print(f"  {len(reader.other_keys)} entries that are no tensors (pickles, never read): {reader.other_keys[0]} …")


def _print_hub(path: Path, *, every: bool) -> None:
    from mindspeed_mm.checkpoint.sources import open_weights

    tensors = open_weights(path).tensors()
    config = json.loads((path / "config.json").read_text(encoding="utf-8")) if (path / "config.json").is_file() else {}
    print(f"{path}: HF directory, {', '.join(config.get('architectures') or ['no architecture in config.json'])}")
    _print_tensors("weights", {n: _entry(tuple(t.shape), t.dtype) for n, t in tensors.items()}, every=every)


def _entry(shape: tuple[int, ...], dtype: torch.dtype) -> _Entry:
    from mindspeed_mm.checkpoint.safetensors_writer import tensor_bytes

    return _Entry(shape, str(dtype).removeprefix("torch."), tensor_bytes(shape, dtype))


def _print_tensors(title: str, entries: Mapping[str, _Entry], *, every: bool) -> None:
    count = sum(_count(e.shape) for e in entries.values())
    print(f"  {title}: {len(entries)} tensors, {count:,} values, {size_words(sum(e.size for e in entries.values()))}")
    lines: dict[tuple[str, _Entry], list[str]] = {}
    for name, entry in entries.items():
        pattern = name if every else re.sub(r"(?<=\.)\d+(?=\.)", "{}", name)
        lines.setdefault((pattern, entry), []).append(name)
    for (pattern, entry), names in lines.items():
        times = f"  x {len(names)}" if len(names) > 1 else ""
        shown = names[0] if len(names) == 1 else pattern
        print(f"    {shown}  {list(entry.shape)} {entry.dtype}{times}")


def _count(shape: tuple[int, ...]) -> int:
    total = 1
    for length in shape:
        total *= length
    return total


def _folder_bytes(path: Path) -> int:
    return sum(p.stat().st_size for p in path.iterdir() if p.is_file())


def size_words(count: float) -> str:
    """Return a number of bytes with its unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


@contextmanager
def progress_bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar of bytes on stderr, if that is a terminal; yield the function that advances it."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=total)
        yield lambda done: progress.advance(task, done)
