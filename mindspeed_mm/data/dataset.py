"""The map-style data set: rows that become samples one by one, when the loader asks for them."""

from __future__ import annotations

import os
import traceback
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from mindspeed_mm.configs.data_config import DatasetParam
from mindspeed_mm.data.adapter import DataAdapter
from mindspeed_mm.data.encode import Encoder, Sample
from mindspeed_mm.data.files import Place, RowSource
from mindspeed_mm.data.images import load_image, locate_image
from mindspeed_mm.data.records import RecordReader
from mindspeed_mm.utils.errors import DataError, MMError


class LazyEncoder:
    """An encoder that is made at first need, in each process anew unless it was forked with one.

    Args:
        param: `dataset_param`.
        max_length: Longest sample in tokens; None means no limit.
        adapter: The model family.
    """

    def __init__(self, param: DatasetParam, max_length: int | None, adapter: DataAdapter) -> None:
        self.param = param
        self.max_length = max_length
        self.adapter = adapter
        self._encoder: Encoder | None = None

    def get(self) -> Encoder:
        """Return the encoder; loads the model's processor the first time."""
        if self._encoder is None:
            # A fork after the tokenizer's first use would warn in every worker; one thread is what a worker should use.
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
            options = self.param.preprocess_parameters
            processor = self.adapter.load_processor(options.model_name_or_path, options)
            self._encoder = Encoder(processor, self.adapter, self.param, self.max_length)
        return self._encoder

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_encoder": None}


class RecordDataset(Dataset):
    """Rows of json, jsonl or parquet files as samples.

    `dataset[i]` is a dict of CPU tensors: `input_ids` [L] int64, `labels` [L] int64 (not shifted, -100 = no target),
    `mm_token_type_ids` [L] int64 where the processor types its tokens, and for rows with images `pixel_values`
    [patches, dim] float32 and `image_grid_thw` [images, 3] int64. Index -1 is a filler without targets.

    Nothing of the model is loaded before the first sample, and then in the process that makes it. Instances can be
    pickled and forked.

    Args:
        source: The rows.
        encoder: Makes samples of conversations; data sets of one run share it.
        indices: Rows of `source` that belong to this data set, in order.
    """

    has_fillers = True  # dataset[-1]

    def __init__(
        self,
        source: RowSource,
        encoder: LazyEncoder,
        indices: np.ndarray,
    ) -> None:
        self.source = source
        self.param = encoder.param
        self.max_length = encoder.max_length
        self.adapter = encoder.adapter
        self.indices = indices
        self._encoder = encoder
        self._reader = RecordReader(self.param.attr)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Sample:
        if index == -1:
            return {**self.encoder.filler(), "num_rows": torch.tensor(0)}
        if not 0 <= index < len(self.indices):
            raise IndexError(f"row {index} of {len(self.indices)}")
        row = int(self.indices[index])
        try:
            return self._sample(row)
        except MMError:
            raise
        except Exception as error:
            where = self.source.where(row)
            raise DataError(f"{where}: {type(error).__name__}: {error}\n{traceback.format_exc()}") from error

    def _sample(self, row: int) -> Sample:
        where = Place(self.source, row)
        conversation = self._reader.read(self.source.row(row), where)
        options, folder = self.param.preprocess_parameters, self.source.folder(row)

        def load(ref: Any) -> Any:
            path = "" if ref.content is not None else locate_image(ref, self.dataset_dir, folder, where)
            return load_image(ref, path, where, options.image_max_pixels, options.image_min_pixels)

        sample, length = self.encoder.encode(conversation, load)
        if sample is None:
            note = (
                f"{where}: {length} tokens, not even the first answer fits into {self.max_length}; nothing is trained"
            )
            return {**self.encoder.filler(), "note": note}
        if len(sample["input_ids"]) < length and length > (self.max_length or length):
            sample["note"] = f"{where}: {length} tokens, cut after {len(sample['input_ids'])} at the end of a turn"
        return sample

    @property
    def dataset_dir(self) -> str:
        """Folder that relative media paths are joined to."""
        return self.param.basic_parameters.dataset_dir

    @property
    def encoder(self) -> Encoder:
        """The encoder of this process, with the model's processor; loaded at first need."""
        return self._encoder.get()

    @property
    def pad_token_id(self) -> int:
        """Id that batches are padded with (loads the tokenizer)."""
        return self.encoder.pad_token_id

    def where(self, index: int) -> str:
        """Name the file and the row of sample `index`, for messages."""
        return self.source.where(int(self.indices[index]))
