"""The documents of a corpus: tokenised once, by one process of each node, into Megatron-core's IndexedDataset."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm.configs.corpus_config import CorpusParameters
from mindspeed_mm.configs.data_config import DatasetParam
from mindspeed_mm.data.loading.checking import LeftOut
from mindspeed_mm.data.loading.identity import stamp
from mindspeed_mm.data.loading.megatron_samples import document_lengths, write_documents
from mindspeed_mm.data.loading.node_build import BuildProgress, build_once
from mindspeed_mm.data.sources.files import DataEntry, RowSource
from mindspeed_mm.data.sources.mixing import repeated
from mindspeed_mm.data.sources.registry import find_data_sets
from mindspeed_mm.data.workers import forked
from mindspeed_mm.utils.errors import BadSample, ConfigError, DataError
from mindspeed_mm.utils.log import logger

_FORMAT = 1
_CHUNK = 64
EMPTY_TEXT = "empty text"


class Corpus:
    """The documents that `dataset_param` names, as token ids in files.

    Attributes:
        tokenizer: That of the model.

    Args:
        param: `dataset_param` of dataset_type corpus.

    Raises:
        ConfigError: `append_eod`, and the tokenizer has no end token.
        BadSample: A document can't be used, and `on_bad_sample` is raise.
        DataError: No documents, or files that can't be read or written.
    """

    def __init__(self, param: DatasetParam, tokenizer: Any) -> None:
        basic, self.options = param.basic_parameters, param.corpus or CorpusParameters()
        self.tokenizer = tokenizer
        self.vocabulary, self.eod = len(tokenizer), tokenizer.eos_token_id
        if self.options.append_eod and self.eod is None:
            raise ConfigError(
                f"dataset_param.corpus.append_eod: the tokenizer of {param.preprocess_parameters.model_name_or_path} "
                "has no end token (eos_token); set one there, or append_eod to false"
            )
        self._entries = find_data_sets(basic.dataset, basic.dataset_dir, param.attr, basic.max_samples, is_text=True)
        folder = Path(str(basic.cache_dir)).absolute() / f"corpus-{_key(param, self._entries)}"
        build = functools.partial(_build, param=param, entries=self._entries, tokenizer=tokenizer)
        build_once(folder, build, "corpus", "basic_parameters.cache_dir", overwrite=basic.overwrite_cache)
        self.prefix = folder / "documents"
        self.lengths = document_lengths(self.prefix)
        self._rows = np.load(folder / "rows.npy", mmap_mode="r")

    def where(self, documents: Sequence[int]) -> str:
        """Name the files and rows of documents that follow each other, for messages."""
        first, last = (self._source.where(int(self._rows[number])) for number in (documents[0], documents[-1]))
        return first if len(documents) == 1 else f"{len(documents)} documents from {first} to {last}"

    @functools.cached_property
    def _source(self) -> RowSource:
        return RowSource(self._entries, is_text=True)


def _key(param: DatasetParam, entries: Sequence[DataEntry]) -> str:
    """A hash of everything that determines the tokens."""
    model = Path(param.preprocess_parameters.model_name_or_path)
    settings = {
        "format": _FORMAT,
        "entries": [repr(entry) for entry in entries],
        "files": [stamp(path) for entry in entries for path in entry.paths],
        "preprocess": param.preprocess_parameters.model_dump(),
        "tokenizer": [stamp(file) for file in sorted(model.glob("*")) if file.suffix in (".json", ".model", ".txt")],
        "append_eod": (param.corpus or CorpusParameters()).append_eod,
        "on_bad_sample": param.basic_parameters.on_bad_sample,
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _build(folder: Path, *, param: DatasetParam, entries: Sequence[DataEntry], tokenizer: Any) -> None:
    source = RowSource(entries, is_text=True)
    parts = zip(source.entry_bounds(), entries, strict=True)
    order = [repeated(np.arange(begin, end), entry.times) for (begin, end), entry in parts]
    chunks = _Chunks(source, np.concatenate(order), param, tokenizer)
    folder.mkdir()
    kept: list[np.ndarray] = []
    write_documents(folder / "documents", _documents(chunks, param, kept), len(tokenizer))
    np.save(folder / "rows.npy", np.concatenate(kept))


def _documents(chunks: _Chunks, param: DatasetParam, kept: list[np.ndarray]) -> Iterator[list[np.ndarray]]:
    """Token ids of documents in order; the numbers of their rows are added to `kept`."""
    from torch.utils.data import DataLoader

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # a fork after the tokenizer's first use would warn
    left_out, skips = LeftOut(), param.basic_parameters.on_bad_sample == "skip"
    workers = min(param.basic_parameters.preprocessing_num_workers or 0, os.cpu_count() or 1)
    loader = DataLoader(chunks, batch_size=None, shuffle=False, num_workers=workers, **forked(workers))
    with BuildProgress("corpus", len(chunks.rows)) as progress:
        for number, chunk in enumerate(loader):
            rows = chunks.rows[number * _CHUNK : (number + 1) * _CHUNK]
            for row, ids in zip(rows.tolist(), chunk, strict=True):
                if isinstance(ids, BadSample) and skips:
                    left_out.add(row, ids.reason, ids)
                elif isinstance(ids, Exception):
                    raise ids
            good = [not isinstance(ids, Exception) for ids in chunk]
            kept.append(rows[good])
            yield list(itertools.compress(chunk, good))
            progress.advance(len(rows))
    if not sum(map(len, kept)):
        raise DataError(f"none of the {len(chunks.rows)} documents can be used: {left_out}")
    if left_out.rows:
        logger.info(f"left out {len(left_out.rows)} of {len(chunks.rows)} documents: {left_out}")


class _Chunks:
    """Some documents at a time as token ids; errors are values, as exceptions of workers lose their type.

    Args:
        source: The rows of the files.
        rows: Numbers of those that are documents, [documents] int64, in order.
        param: `dataset_param`.
        tokenizer: Of the model.
    """

    def __init__(self, source: RowSource, rows: np.ndarray, param: DatasetParam, tokenizer: Any) -> None:
        self.rows = rows
        self._source, self._tokenizer = source, tokenizer
        self._eod = [tokenizer.eos_token_id] if (param.corpus or CorpusParameters()).append_eod else []
        self._splits = param.preprocess_parameters.split_special_tokens

    def __len__(self) -> int:
        return -(-len(self.rows) // _CHUNK)

    def __getitem__(self, chunk: int) -> list[np.ndarray | Exception]:
        """Return the documents of a chunk: [tokens] int32, or why it can't be used."""
        return [self._ids(row) for row in self.rows[chunk * _CHUNK : (chunk + 1) * _CHUNK].tolist()]

    def _ids(self, row: int) -> np.ndarray | Exception:
        try:
            parts = self._source.read(row).messages[0].parts
        except (BadSample, DataError) as error:
            return error
        text = "".join(part for part in parts if isinstance(part, str))
        ids = self._tokenizer(text, split_special_tokens=self._splits, verbose=False)["input_ids"] if text else []
        if not ids:
            return BadSample(f"{self._source.where(row)}: the text is empty; expected a document", EMPTY_TEXT)
        return np.array(ids + self._eod, dtype=np.int32)
