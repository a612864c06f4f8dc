"""The map-style data set, which encodes rows one by one when the loader reads them."""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash
from torch.utils.data import Dataset

from mindspeed_mm.configs.data_config import DatasetParam
from mindspeed_mm.data.adapter import DataAdapter
from mindspeed_mm.data.conversation.encode import TOO_LONG, Encoder, Prepared, TokenSample
from mindspeed_mm.data.conversation.messages import Conversation
from mindspeed_mm.data.conversation.tokens import Decoded
from mindspeed_mm.data.loading.identity import hash_of, row_settings
from mindspeed_mm.data.loading.token_cache import TokenCache
from mindspeed_mm.data.media.media import Geometry, MediaRef, SampleSize
from mindspeed_mm.data.places import Place
from mindspeed_mm.data.plan.order import as_row_numbers
from mindspeed_mm.data.processors import Processor
from mindspeed_mm.data.sources.files import RowSource
from mindspeed_mm.utils.errors import BadSample, DataError, MMError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from mindspeed_mm.data.media.media_reader import MediaReader


class LazyEncoder:
    """An encoder that is built when it is first needed, in each process anew unless it was forked with one.

    Args:
        param: `dataset_param`.
        max_length: Longest sample in tokens; None means no limit.
        adapter: The model family.
    """

    def __init__(self, param: DatasetParam, max_length: int | None, adapter: DataAdapter) -> None:
        self.param = param
        self.max_length = max_length
        self.adapter = adapter
        self._built: tuple[Encoder, MediaReader, Processor] | None = None

    def get(self) -> Encoder:
        """Return the encoder; loads the model's processor the first time."""
        return self._build()[0]

    def reader(self) -> MediaReader:
        """Return the reader of media, with the limits of the model's processor."""
        return self._build()[1]

    def processor(self) -> Processor:
        """Return the model's processor, or its tokenizer where it reads text only."""
        return self._build()[2]

    def _build(self) -> tuple[Encoder, MediaReader, Processor]:
        if self._built is None:
            from mindspeed_mm.data.media.media_reader import MediaReader

            # A fork after the tokenizer's first use would warn in every worker; one thread is what a worker should use.
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
            options = self.param.preprocess_parameters
            processor = self.adapter.load_processor(options.model_name_or_path, options)
            encoder_class = self.adapter.encoder_class or Encoder
            encoder = encoder_class(processor, self.adapter, self.param, self.max_length)
            self._built = encoder, MediaReader(options, self.adapter.limits(processor)), processor
        return self._built

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_built": None}


class RowMedia:
    """The media of one row: their reader and folders, and the row's name for messages."""

    def __init__(self, reader: MediaReader, folders: Sequence[str], where: object) -> None:
        self._reader, self._folders, self._where = reader, folders, where

    def look(self, ref: MediaRef) -> Geometry:
        return self._reader.look(ref, self._folders, self._where)

    def open(self, ref: MediaRef) -> Decoded:
        return self._reader.open(ref, self._folders, self._where)


class RecordDataset(Dataset):
    """Rows of data files as samples.

    `dataset[i]` is a dict of CPU tensors: `input_ids` [L] int64, `labels` [L] int64 (not shifted, -100 = no target),
    `mm_token_type_ids` (or as the family calls it) [L] int64 where the processor types its tokens, and the media
    tensors as the processor names them: `pixel_values` [patches, dim] float32, `image_grid_thw` [images, 3] int64 and
    so on. Index -1 is a filler without targets. A row that gives no sample (skipped, or longer than the limit) is a
    filler too, with `fault` (the reason, to count by) and `note` (which row, and what is wrong with it); a row that was
    cut has a `note` only.

    Nothing of the model is loaded before the first sample (or `warm_up`), and then in the process that encodes it.
    Instances can be pickled and forked.

    Args:
        source: The rows.
        encoder: Encodes conversations; data sets of one run share it.
        indices: Rows of `source` that belong to this data set, in order; None for a stream, whose rows are found
            while they are read.
        cache: Ids and labels of the rows, computed before; None: they are computed when a row is read.
    """

    has_fillers = True  # dataset[-1]

    def __init__(
        self,
        source: RowSource,
        encoder: LazyEncoder,
        indices: np.ndarray | None,
        cache: TokenCache | None = None,
    ) -> None:
        self.source = source
        self.param = encoder.param
        self.max_length = encoder.max_length
        self.adapter = encoder.adapter
        self.indices = None if indices is None else as_row_numbers(indices)
        self.lazy_encoder = encoder
        self.cache = cache

    def __len__(self) -> int:
        if self.indices is None:
            raise TypeError("a stream of rows has no length")
        return len(self.indices)

    def warm_up(self) -> None:
        """Load the model's processor in this process, for workers that are forked from it."""
        self.lazy_encoder.get()

    def check_model(self, config: PreTrainedConfig | None, model: str) -> None:
        """Check tokenizer, processor and chat template before a run; loads them, and logs how answers end.

        Args:
            config: transformers' configuration of the model that is trained; None: it isn't known.
            model: Where it was read from, for messages.

        Raises:
            ConfigError: They don't belong to the model, or there is no chat template for rows that need one.
        """
        from mindspeed_mm.data.loading.model_match import check_model_match

        if config is not None:
            path = self.param.preprocess_parameters.model_name_or_path
            check_model_match(self.lazy_encoder.processor(), self.adapter, path, config, model)
        if isinstance(self.encoder, Encoder) and not self.source.is_text:
            _ = self.encoder.template

    def has_row(self, index: int) -> bool:
        """Whether there is a row of this number; a stream is searched up to it."""
        return self.source.has(index) if self.indices is None else 0 <= index < len(self.indices)

    def __getitem__(self, index: int) -> TokenSample:
        return self.get(index)

    def get(self, index: int, piece: int = 0, room: int | None = None) -> TokenSample:
        """Return a sample.

        Args:
            index: Row of this data set; -1 is the filler.
            piece: Which piece of a plain text that is longer than the limit.
            room: Longest sample in tokens, where less than the limit is left.

        Raises:
            BadSample: The row can't be used, and `on_bad_sample` is raise.
            DataError: Any other error of the row, with its place and a traceback.
        """
        if index == -1:
            return self._filler()
        row = self._row(index)
        try:
            pieces = self._prepare(row, room)
            prepared = pieces[piece]
            sample = self.encoder.finish(prepared, self._media_of(row), Place(self.source, row))
        except BadSample as error:
            if self._must_raise(error):
                raise
            return {**self._filler(), "note": str(error), "fault": error.reason}
        except MMError:
            raise
        except Exception as error:
            raise self._unforeseen(row, error) from error
        # a plain text that isn't packed gives its first piece only
        if len(prepared) < prepared.whole_length and (len(pieces) == 1 or room is None):
            at = "at the end of a turn" if len(pieces) == 1 else "where the limit fell"
            where = self.source.where(row)
            sample["note"] = f"{where}: {prepared.whole_length} tokens, cut after {len(prepared)} {at}"
        return sample

    def measure(self, index: int) -> list[SampleSize]:
        """Return the size of a row's sample without decoding its media: one entry a piece.

        Raises:
            BadSample: The row can't be used, and `on_bad_sample` is raise.
        """
        found = self.prepare(index)
        if isinstance(found, BadSample):
            return [SampleSize(0, fault=found.reason)]
        return [prepared.size for prepared in found]

    def sizes_key(self) -> str:
        """A hash of everything that determines what `measure` returns, media files apart."""
        settings = row_settings(self.source, self.param, self.max_length, self.adapter)
        indices = None if self.indices is None else xxhash.xxh3_64_hexdigest(np.ascontiguousarray(self.indices))
        return hash_of({"sizes": 1, "mixture": repr(self.source.mixture), "indices": indices, **settings})

    def total_tokens(self) -> int | None:
        """Tokens of all samples, if there is a token cache."""
        return None if self.cache is None else int(self.cache.tokens()[self.indices].sum())

    def prepare(self, index: int) -> list[Prepared] | BadSample:
        """Return a row's ids and labels without decoding its media, or the error if it gives no sample.

        Raises:
            BadSample: The row can't be used, and `on_bad_sample` is raise.
        """
        row = self._row(index)
        try:
            return self._prepare(row, None)
        except BadSample as error:
            if self._must_raise(error):
                raise
            return error
        except MMError:
            raise
        except Exception as error:
            raise self._unforeseen(row, error) from error

    def conversation(self, index: int) -> Conversation:
        """Return a row as it was read, before it is rendered.

        Raises:
            BadSample: It can't be read as one.
        """
        return self.source.read(self._row(index))

    def media_of(self, index: int) -> RowMedia:
        """Return the reader of a row's media."""
        return self._media_of(self._row(index))

    def _prepare(self, row: int, limit: int | None) -> list[Prepared]:
        if self.cache is not None:
            found = self.cache.prepared(row, self.source.read(row).media)
            if isinstance(found, BadSample):
                raise found
            if limit is None or all(len(piece) <= limit for piece in found):
                return found
        return self.encoder.prepare(self.source.read(row), self._media_of(row), limit)

    def _must_raise(self, error: BadSample) -> bool:
        return error.reason != TOO_LONG and self.param.basic_parameters.on_bad_sample == "raise"

    def _media_of(self, row: int) -> RowMedia:
        return RowMedia(self.lazy_encoder.reader(), self.source.folders(row), Place(self.source, row))

    def _row(self, index: int) -> int:
        if self.indices is None:
            return index
        if not 0 <= index < len(self.indices):
            raise IndexError(f"row {index} of {len(self.indices)}")
        return int(self.indices[index])

    def _filler(self) -> TokenSample:
        return {**self.encoder.filler(), "num_rows": torch.tensor(0)}

    def _unforeseen(self, row: int, error: Exception) -> DataError:
        where = self.source.where(row)
        return DataError(f"{where}: {type(error).__name__}: {error}\n{traceback.format_exc()}")

    @property
    def dataset_dir(self) -> str:
        """Folder that relative media paths are joined to."""
        return self.param.basic_parameters.dataset_dir

    @property
    def encoder(self) -> Encoder:
        """The encoder of this process, with the model's processor; loaded at first need."""
        return self.lazy_encoder.get()

    @property
    def pad_token_id(self) -> int:
        """Id that batches are padded with (loads the tokenizer)."""
        return self.encoder.pad_token_id

    def where(self, index: int) -> str:
        """Name the file and the row of sample `index`, for messages."""
        return self.source.where(self._row(index))
