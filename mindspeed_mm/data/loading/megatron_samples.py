"""Megatron-core's data sets of documents: the one place of the data room that imports megatron.

Its IndexedDataset keeps the documents' tokens, and its GPTDataset, with compiled helpers, cuts them into rows of one
length in an order that a seed decides. Both are used as they are; only where the index of rows is built differs: in the
first process of each node, whatever its rank, and without a barrier.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mindspeed_mm.data.loading.node_build import build_once
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.extras import require_extra

_MODULES = "megatron.core.datasets"


@dataclass(frozen=True)
class RowRequest:
    """What decides which rows are cut of a corpus, and their order.

    Attributes:
        seed: of the order.
        length: tokens of a row.
        rows: least number of rows, over as many epochs as that takes; None: those of one epoch.
        part: train, valid or test.
        split: shares of the three.
        eod: id of the end token; None: there is none.
        vocabulary: number of token ids.
        resets: documents of a row don't see each other, and positions begin anew.
    """

    seed: int
    length: int
    rows: int | None
    part: str
    split: tuple[float, ...]
    eod: int | None
    vocabulary: int
    resets: bool

    def documents(self, count: int) -> np.ndarray:
        """Return the numbers of the part's documents, [documents] int32, as Megatron-core's builder splits them."""
        module = _modules().split
        shares = module.parse_and_normalize_split(",".join(map(str, self.split)))
        bounds = module.convert_split_vector_to_split_matrix(shares)[_part(self.part).value]
        begin, end = (0, 0) if bounds is None else (round(bound * float(count)) for bound in bounds)
        return np.arange(begin, end, dtype=np.int32)


@dataclass(frozen=True)
class _Tokenizer:
    """What GPTDatasetConfig asks a tokenizer for."""

    vocab_size: int
    eod: int | None

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        return asdict(self)


def require_megatron_samples(what: str) -> None:
    """Check that Megatron-core's data sets and their compiled helpers can be imported.

    Args:
        what: The feature that needs them, the beginning of the message.

    Raises:
        ConfigError: They can't.
    """
    require_extra("megatron", what)
    try:
        _modules()
        from megatron.core.datasets import helpers_cpp  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"{what} needs the compiled helpers of megatron-core ({_MODULES}.helpers_cpp), which can't be imported "
            f"({error}); install a wheel of it for this machine, or build it with a C++ compiler and pybind11: pip "
            "install --no-cache-dir --force-reinstall --no-deps --no-binary megatron-core 'megatron-core<0.17'"
        ) from error


def write_documents(prefix: Path, documents: Iterator[Sequence[np.ndarray]], vocabulary: int) -> None:
    """Write an IndexedDataset, `prefix`.bin and `prefix`.idx.

    Args:
        documents: Token ids of documents, some at a time.
        vocabulary: Number of token ids, which decides their width in the file.
    """
    module = _modules().documents
    dtype = module.DType.optimal_dtype(vocabulary)
    builder = module.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for some in documents:
        for ids in some:
            builder.add_document(ids, [len(ids)])
    builder.finalize(f"{prefix}.idx")


def document_lengths(prefix: Path) -> np.ndarray:
    """Return the number of tokens of each document, [documents] int32."""
    documents = _modules().documents.IndexedDataset(str(prefix))  # its end closes the file that its arrays lie in
    return np.array(documents.sequence_lengths)


def open_samples(prefix: Path, request: RowRequest) -> Any:
    """Return the GPTDataset of a request; its index of rows is built once a node, beside the documents.

    Args:
        prefix: Of the documents' files.
        request: Which rows.
    """
    name = hashlib.sha256(json.dumps(asdict(request)).encode()).hexdigest()[:16]
    folder = prefix.parent / f"rows-{name}"

    def build(working: Path) -> None:
        made = _gpt_dataset(prefix, request, None)
        working.mkdir()
        start = f"{made.unique_description_hash}-{type(made).__name__}-{made.index_split.name}"
        for kind in ("document", "sample", "shuffle"):
            np.save(working / f"{start}-{kind}_index.npy", getattr(made, f"{kind}_index"))
        (working / f"{start}-description.txt").write_text(made.unique_description)

    build_once(folder, build, "index of rows", "basic_parameters.cache_dir")
    return _gpt_dataset(prefix, request, folder)


def _gpt_dataset(prefix: Path, request: RowRequest, cache: Path | None) -> Any:
    """GPTDataset with its index in a folder; without one, it builds it in memory, in this process alone."""
    module = _modules().rows
    with _quiet():
        config = module.GPTDatasetConfig(
            random_seed=request.seed,
            sequence_length=request.length,
            tokenizer=_Tokenizer(request.vocabulary, request.eod),
            reset_position_ids=request.resets,
            reset_attention_mask=request.resets,
            eod_mask_loss=False,
            create_attention_mask=False,
            path_to_cache=None if cache is None else str(cache),
        )
        documents = _modules().documents.IndexedDataset(str(prefix))
        part = request.documents(len(documents.sequence_lengths))
        return module.GPTDataset(documents, str(prefix), part, request.rows, _part(request.part), config)


def _part(name: str) -> Any:
    return _modules().names.Split[name]


class _Modules(NamedTuple):
    """Megatron-core's modules of data sets."""

    split: Any
    documents: Any
    rows: Any
    names: Any


@functools.cache
def _modules() -> _Modules:
    with warnings.catch_warnings(action="ignore"):  # about packages that only its models use
        from megatron.core.datasets import blended_megatron_dataset_config, gpt_dataset, indexed_dataset, utils
    return _Modules(blended_megatron_dataset_config, indexed_dataset, gpt_dataset, utils)


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out Megatron-core's warning that an index in memory isn't kept."""
    log = logging.getLogger(_MODULES)
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
