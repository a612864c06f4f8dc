"""Build the token cache, in one process per node, in a file that appears when it is complete.

Its name is a hash of everything that determines its content.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm.data.loading.dataset import LazyEncoder, RecordDataset
from mindspeed_mm.data.loading.token_cache import TokenCache
from mindspeed_mm.data.sources.files import RowSource
from mindspeed_mm.data.workers import forked
from mindspeed_mm.utils.errors import BadSample, ConfigError, DataError
from mindspeed_mm.utils.extras import require_extra
from mindspeed_mm.utils.launch import is_first_local_rank, rank_word, this_launch
from mindspeed_mm.utils.log import logger

_FORMAT = 2
_CHUNK = 64
#: seconds after which a process checks that it sees the folder of the process that builds the cache
PATIENCE = 60.0
#: settings without influence on ids and labels
_WITHOUT_EFFECT = {
    "dataset", "val_dataset", "val_rate", "val_size", "val_max_samples", "max_samples", "streaming", "buffer_size",
    "packing", "neat_packing", "mix_strategy", "interleave_probs", "preprocess_on_fly", "cache_dir", "overwrite_cache",
    "preprocessing_num_workers", "dataset_dir", "on_bad_sample", "cutoff_len",
}  # fmt: skip


def open_cache(dataset: RecordDataset) -> TokenCache:
    """Open the cache of a data set's rows; the first process of the node builds it where there is none.

    Args:
        dataset: A data set of indexed rows; `cache_dir` and `overwrite_cache` are taken from its parameters.

    Raises:
        ConfigError: No `cache_dir`.
        BadSample: A row can't be used, and `on_bad_sample` is raise.
        DataError: The folder can't be written, or this process doesn't see the file that the node's first one builds.
    """
    basic = dataset.param.basic_parameters
    if basic.cache_dir is None:
        raise ConfigError(
            "dataset_param.basic_parameters.preprocess_on_fly is false, and there is no cache_dir; name a folder for "
            "the token cache, or leave preprocess_on_fly out"
        )
    require_extra("tables", "dataset_param.basic_parameters.preprocess_on_fly false: the token cache")
    folder = Path(basic.cache_dir).absolute()
    path = folder / f"tokens-{_key(dataset)}.arrow"
    lock = path.with_suffix(".lock")
    if not is_first_local_rank():
        _await(path, lock, since=_launch_time() if basic.overwrite_cache else 0.0)
        return TokenCache(str(path))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"basic_parameters.cache_dir {folder} can't be made: {error.strerror}") from error
    from filelock import FileLock

    with FileLock(lock):  # nodes that share the folder build one cache
        if not path.is_file() or (basic.overwrite_cache and path.stat().st_mtime < _launch_time()):
            _build(dataset, path)
    return TokenCache(str(path))


def _key(dataset: RecordDataset) -> str:
    """A hash of everything that determines the content: rows, settings, the processor's files, the length limit."""
    param = dataset.param
    basic = {k: v for k, v in param.basic_parameters.model_dump().items() if k not in _WITHOUT_EFFECT}
    model = Path(param.preprocess_parameters.model_name_or_path)
    settings = {
        "format": _FORMAT,
        "rows": [_stamp(Path(file.path)) for file in dataset.source.files],
        "offsets": dataset.source.offsets.tolist(),
        "entries": [repr(entry) for entry in dataset.source.entries],
        "basic": basic,
        "preprocess": param.preprocess_parameters.model_dump(),
        "processor": [_stamp(file) for file in sorted(model.glob("*")) if file.suffix in (".json", ".jinja", ".model")],
        "max_length": dataset.max_length,
        "adapter": type(dataset.adapter).__qualname__,
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _stamp(path: Path) -> list[Any]:
    status = path.stat()
    return [str(path.absolute()), status.st_size, status.st_mtime_ns]


def _build(dataset: RecordDataset, path: Path) -> None:
    import pyarrow as pa

    schema = pa.schema(
        [
            ("ids", pa.large_binary()),
            ("labels", pa.large_binary()),
            ("types", pa.large_binary()),
            ("bounds", pa.list_(pa.int64())),
            ("media", pa.large_string()),
            ("whole_length", pa.int64()),
            ("fault", pa.string()),
            ("note", pa.string()),
        ]
    )
    working = path.with_suffix(f".{os.getpid()}.tmp")
    rows, started = len(dataset.source), time.perf_counter()
    logger.info(f"building the token cache of {rows} rows in {path}")
    try:
        with (
            pa.OSFile(str(working), "wb") as sink,
            pa.ipc.new_file(sink, schema) as writer,
            _Progress(rows) as progress,
        ):
            for chunk in _prepared_rows(dataset):
                writer.write_batch(pa.RecordBatch.from_pylist(chunk, schema))
                progress.advance(len(chunk))
        with open(working, "rb") as file:
            os.fsync(file.fileno())
        os.replace(working, path)
    except OSError as error:
        raise DataError(f"token cache {path} can't be written: {error.strerror or error}") from error
    finally:
        working.unlink(missing_ok=True)
    logger.info(f"token cache built in {time.perf_counter() - started:.1f} s")


class _Rows:
    """Entries of the cache, a chunk at a time; errors are values, as exceptions of workers lose their type."""

    def __init__(self, source: RowSource, encoder: LazyEncoder) -> None:
        self._source, self._encoder = source, encoder

    def __len__(self) -> int:
        return -(-len(self._source) // _CHUNK)

    def __getitem__(self, chunk: int) -> list[dict[str, Any]] | Exception:
        low = chunk * _CHUNK
        indices = np.arange(low, min(low + _CHUNK, len(self._source)))
        dataset = RecordDataset(self._source, self._encoder, indices)
        try:
            return [_entry(dataset, index) for index in range(len(indices))]
        except (BadSample, DataError) as error:
            return error


def _entry(dataset: RecordDataset, index: int) -> dict[str, Any]:
    found = dataset.prepare(index)
    if isinstance(found, BadSample):
        return {
            "ids": b"", "labels": b"", "types": b"", "bounds": [0], "media": "[]", "whole_length": 0,
            "fault": found.reason, "note": str(found),
        }  # fmt: skip
    media = [[medium.text, medium.patches, medium.squared_patches] for medium in found[0].media]
    return {
        "ids": np.concatenate([piece.ids for piece in found]).astype(np.int32).tobytes(),
        "labels": np.concatenate([piece.labels for piece in found]).astype(np.int32).tobytes(),
        "types": np.concatenate([piece.types for piece in found]).astype(np.int8).tobytes(),
        "bounds": np.cumsum([0, *map(len, found)]).tolist(),
        "media": json.dumps(media),
        "whole_length": found[0].whole_length,
        "fault": None,
        "note": None,
    }


def _prepared_rows(dataset: RecordDataset) -> Iterator[list[dict[str, Any]]]:
    from torch.utils.data import DataLoader

    rows: Any = _Rows(dataset.source, dataset.lazy_encoder)
    workers = dataset.param.basic_parameters.preprocessing_num_workers or 0
    workers = min(workers, os.cpu_count() or 1)
    for chunk in DataLoader(rows, batch_size=None, shuffle=False, num_workers=workers, **forked(workers)):
        if isinstance(chunk, Exception):
            raise chunk
        yield chunk


class _Progress:
    """A bar on a terminal; elsewhere a line now and then."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

        console = Console(stderr=True)
        self._total, self._done, self._logged = total, 0, time.perf_counter()
        self._bar = Progress(
            *Progress.get_default_columns()[:-1], MofNCompleteColumn(), TimeRemainingColumn(), console=console
        )
        self._quiet = not console.is_terminal
        self._task = self._bar.add_task("token cache", total=total)

    def __enter__(self) -> _Progress:
        if not self._quiet:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self, rows: int) -> None:
        self._done += rows
        self._bar.advance(self._task, rows)
        if self._quiet and time.perf_counter() - self._logged > 10:
            self._logged = time.perf_counter()
            logger.info(f"token cache: {self._done} of {self._total} rows")


def _await(path: Path, lock: Path, since: float) -> None:
    """Wait until local rank 0 of this node has built the cache.

    Raises:
        DataError: Neither the cache nor the lock of the process that builds it can be seen here.
    """
    started = time.monotonic()
    while not (path.is_file() and path.stat().st_mtime >= since):
        if not lock.exists() and time.monotonic() - started > PATIENCE:
            raise DataError(
                f"rank {rank_word()} (local rank {this_launch().local_rank}) sees no token cache "
                f"{path} and no process building it; every process of a node must see the same "
                f"basic_parameters.cache_dir (working folder here: {os.getcwd()})"
            )
        time.sleep(0.2)


def _launch_time() -> float:
    """When this launch began: the start of the launcher (the parent process), in seconds since the epoch."""
    try:
        fields = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
        boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
        return int(boot.split()[1]) + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, StopIteration):
        return time.time()
