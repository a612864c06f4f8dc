"""Build the token cache, in one process per node, in a file that appears when it is complete.

Its name is a hash of everything that determines its content.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm.data.loading.dataset import LazyEncoder, RecordDataset
from mindspeed_mm.data.loading.identity import hash_of, row_settings
from mindspeed_mm.data.loading.node_build import BuildProgress, build_once
from mindspeed_mm.data.loading.token_cache import TokenCache
from mindspeed_mm.data.sources.files import RowSource
from mindspeed_mm.data.workers import forked
from mindspeed_mm.utils.errors import BadSample, ConfigError, DataError
from mindspeed_mm.utils.extras import require_extra

_FORMAT = 2
_CHUNK = 64
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
    path = Path(basic.cache_dir).absolute() / f"tokens-{_key(dataset)}.arrow"
    key, overwrite = "basic_parameters.cache_dir", basic.overwrite_cache
    build_once(path, lambda working: _build(dataset, working), "token cache", key, overwrite=overwrite)
    return TokenCache(str(path))


def _key(dataset: RecordDataset) -> str:
    """A hash of everything that determines the content."""
    settings = row_settings(dataset.source, dataset.param, dataset.max_length, dataset.adapter, _WITHOUT_EFFECT)
    return hash_of({"format": _FORMAT, **settings})


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
    with (
        pa.OSFile(str(path), "wb") as sink,
        pa.ipc.new_file(sink, schema) as writer,
        BuildProgress("token cache", len(dataset.source)) as progress,
    ):
        for chunk in _prepared_rows(dataset):
            writer.write_batch(pa.RecordBatch.from_pylist(chunk, schema))
            progress.advance(len(chunk))


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
