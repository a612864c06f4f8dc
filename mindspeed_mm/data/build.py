"""From `dataset_param` to data sets: files found, first rows checked, validation rows set apart."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from mindspeed_mm.configs.data_config import DatasetParam
from mindspeed_mm.data.adapter import DataAdapter, DefaultAdapter, check_model_path
from mindspeed_mm.data.dataset import LazyEncoder, RecordDataset
from mindspeed_mm.data.files import Place, RowSource, locate_file
from mindspeed_mm.data.images import locate_image
from mindspeed_mm.data.named_templates import named_template
from mindspeed_mm.data.records import RecordReader
from mindspeed_mm.utils.errors import DataError
from mindspeed_mm.utils.log import info_rank0, notice

# How many rows of a file are read at the start, to find faults and rows without a target; the others are checked when
# they are used. Bounded, so that a run starts in seconds on files of any size.
CHECKED_ROWS = 50_000
_ROWS_FOR_COLUMNS = 100
_ROWS_FOR_MEDIA = 16


def build_dataset(
    param: DatasetParam, max_length: int | None = None, adapter: DataAdapter | None = None, seed: int = 1234
) -> RecordDataset | tuple[RecordDataset, RecordDataset]:
    """Build the training data set, and the validation data set if data.json asks for one.

    Args:
        param: Typed `dataset_param`.
        max_length: Longest sample in tokens; None takes `cutoff_len`, and without that there is no limit.
        adapter: The model family; None takes the default one.
        seed: Decides which rows `val_rate` takes.

    Returns:
        The data set, or (training, validation).

    Raises:
        ConfigError: The model directory doesn't exist or holds no tokenizer; unknown template.
        DataError: A file or one of its first rows can't be used.
    """
    basic = param.basic_parameters
    check_model_path(param.preprocess_parameters.model_name_or_path)
    if basic.template is not None:
        named_template(basic.template)  # an unknown name ends the run here, not in a worker
    max_length = basic.cutoff_len if max_length is None else max_length
    encoder = LazyEncoder(param, max_length, DefaultAdapter() if adapter is None else adapter)

    source, rows = _open(param, basic.dataset, basic.max_samples)
    if basic.val_dataset and basic.val_max_samples != 0:
        val_source, val_rows = _open(param, basic.val_dataset, None)
    elif basic.val_rate and basic.val_max_samples != 0:
        val_source, (rows, val_rows) = source, _split(rows, basic.val_rate, seed)
    else:
        return RecordDataset(source, encoder, rows)
    return RecordDataset(source, encoder, rows), RecordDataset(val_source, encoder, val_rows[: basic.val_max_samples])


def _open(param: DatasetParam, names: Sequence[str], limit: int | None) -> tuple[RowSource, np.ndarray]:
    source = RowSource([locate_file(name, param.basic_parameters.dataset_dir) for name in names], limit)
    return source, check_rows(source, param)


def check_rows(source: RowSource, param: DatasetParam) -> np.ndarray:
    """Read the first rows of each file: find faults before a run starts, and leave out rows without a target.

    Returns:
        Indices of the rows to use, [rows] int64.

    Raises:
        DataError: What is wrong with which row, or that no row is left.
    """
    reader, without_target = RecordReader(param.attr), []
    for path, rows in source.heads(CHECKED_ROWS):
        first = list(itertools.islice(rows, _ROWS_FOR_COLUMNS))
        columns = set().union(*(row for _, row in first))
        reader.check_columns(columns, path)
        for name in reader.unused_columns(columns):
            notice(f"{path}: column '{name}' isn't used; to use it, name it in dataset_param.attr.{name}")
        for number, (index, row) in enumerate(itertools.chain(first, rows)):
            where = Place(source, index)
            conversation = reader.read(row, where)
            if not conversation.has_target:
                without_target.append(index)
            for ref in conversation.images if number < _ROWS_FOR_MEDIA else ():
                if ref.content is None:
                    locate_image(ref, param.basic_parameters.dataset_dir, source.folder(index), where)
    return _all_but(source, without_target)


def _all_but(source: RowSource, without_target: Sequence[int]) -> np.ndarray:
    keep = np.ones(len(source), dtype=bool)
    keep[list(without_target)] = False
    if not keep.any():
        raise DataError(f"{source.where(0)}, and every other row: no turn of the assistant to train on")
    if without_target:
        info_rank0(
            f"left out {len(without_target)} of {len(source)} rows: no turn of the assistant to train on "
            f"(the first: {source.where(without_target[0])})"
        )
    return np.flatnonzero(keep)


def _split(rows: np.ndarray, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Take a share of the rows for validation: at random by seed, at least one; both parts stay in file order."""
    if len(rows) < 2:
        raise DataError(f"val_rate {share}: {len(rows)} row can't be split into training and validation rows")
    count = min(len(rows) - 1, max(1, round(len(rows) * share)))
    order = np.argsort(np.random.PCG64(seed).random_raw(len(rows)), kind="stable")
    return np.sort(rows[order[count:]]), np.sort(rows[order[:count]])
