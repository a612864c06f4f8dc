"""Build data sets from `dataset_param`: find files, check first rows, mix, split off validation rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mindspeed_mm.configs.data_config import DatasetParam
from mindspeed_mm.data.adapter import DataAdapter, DefaultAdapter, check_model_path
from mindspeed_mm.data.conversation.named_templates import named_template
from mindspeed_mm.data.loading.checking import check_rows
from mindspeed_mm.data.loading.dataset import LazyEncoder, RecordDataset
from mindspeed_mm.data.sources.files import DataEntry, RowSource
from mindspeed_mm.data.sources.mixing import Mixture, repeated
from mindspeed_mm.data.sources.registry import find_data_sets
from mindspeed_mm.data.sources.row_forms import recognise
from mindspeed_mm.data.sources.splitting import split_rows
from mindspeed_mm.utils.errors import ConfigError, DataError
from mindspeed_mm.utils.log import notice


def build_dataset(
    param: DatasetParam, max_length: int | None = None, adapter: DataAdapter | None = None, seed: int = 1234
) -> RecordDataset | tuple[RecordDataset, RecordDataset]:
    """Build the training data set, and the validation data set if data.json asks for one.

    Args:
        param: Typed `dataset_param`.
        max_length: Longest sample in tokens; None takes `cutoff_len`, and without that there is no limit.
        adapter: The model family; None takes the default one.
        seed: Decides which rows `val_rate` takes, and how data sets are mixed.

    Returns:
        The data set, or (training, validation).

    Raises:
        ConfigError: The model directory doesn't exist or has no tokenizer; unknown template; preference pairs.
        DataError: A file or one of its first rows can't be used.
    """
    basic = param.basic_parameters
    if param.dataset_type == "corpus":
        raise ConfigError(
            "dataset_param.dataset_type is corpus: its rows depend on the length of the run, which train_valid_test_"
            "datasets_provider of mindspeed_mm.tasks.train.language is given"
        )
    check_model_path(param.preprocess_parameters.model_name_or_path)
    if basic.template is not None:
        named_template(basic.template)  # an unknown name ends the run here, not in a worker
    if not param.preprocess_parameters.use_fast_tokenizer:
        notice("preprocess_parameters.use_fast_tokenizer: false has no effect here: exact targets need the fast one")
    max_length = basic.cutoff_len if max_length is None else max_length
    encoder = LazyEncoder(param, max_length, DefaultAdapter() if adapter is None else adapter)

    entries = _entries(param, basic.dataset, basic.max_samples)
    shares = None if basic.interleave_probs is None else tuple(basic.interleave_probs)
    mixture = Mixture(basic.mix_strategy, shares, seed)
    mixture.check(len(entries))
    source = open_rows_of(param, entries, mixture, lazy=basic.streaming)
    rows = check_rows(source, basic.on_bad_sample == "skip")

    if basic.val_dataset and basic.val_max_samples != 0:
        val_source = open_rows_of(param, _entries(param, basic.val_dataset, None))
        val_rows = check_rows(val_source, basic.on_bad_sample == "skip")
    elif (basic.val_rate or basic.val_size) and basic.val_max_samples != 0:
        val_source, (rows, val_rows) = source, split_rows(rows, basic.val_rate or basic.val_size or 0, seed)
    else:
        return _with_cache(RecordDataset(source, encoder, _mixed(source, rows, mixture)))
    training = _with_cache(RecordDataset(source, encoder, _mixed(source, rows, mixture)))
    return training, _with_cache(RecordDataset(val_source, encoder, val_rows[: basic.val_max_samples]))


def _with_cache(dataset: RecordDataset) -> RecordDataset:
    """Open the token cache of a data set, if data.json asks for one."""
    basic = dataset.param.basic_parameters
    if basic.preprocess_on_fly is not False:
        if basic.cache_dir is not None:
            notice(
                f"basic_parameters.cache_dir {basic.cache_dir} isn't used: rows are prepared on the fly; to make their "
                "tokens once, before training, and keep them there, set preprocess_on_fly to false"
            )
    elif basic.streaming:
        raise ConfigError(
            "basic_parameters: streaming is true and preprocess_on_fly false; a stream is prepared on the fly, keep one"
        )
    else:
        from mindspeed_mm.data.loading.token_cache_maker import open_cache

        dataset.cache = open_cache(dataset)
    return dataset


def open_rows_of(
    param: DatasetParam, entries: Sequence[DataEntry], mixture: Mixture | None = None, lazy: bool = False
) -> RowSource:
    """Open the rows of data sets as `dataset_param` describes them; columns that it doesn't name are recognised.

    Args:
        param: Typed `dataset_param`.
        entries: The data sets.
        mixture: How lazy rows are drawn from several data sets.
        lazy: Find rows when they are read.
    """
    basic = param.basic_parameters
    is_text = basic.stage in ("pt", "pretrain")
    if not is_text:
        entries = [recognise(entry) for entry in entries]
    return RowSource(entries, default_system=basic.default_system, is_text=is_text, lazy=lazy, mixture=mixture)


def _entries(param: DatasetParam, names: Sequence[str | Mapping[str, Any]], max_samples: int | None) -> list[DataEntry]:
    basic = param.basic_parameters
    is_text = basic.stage in ("pt", "pretrain")
    entries = find_data_sets(names, basic.dataset_dir, param.attr, max_samples, is_text=is_text)
    for entry in entries:
        if entry.attr.ranking:
            raise ConfigError(
                f"data set '{entry.name}': 'ranking' is true, and training on preference pairs isn't there; to train "
                "on the preferred answers alone, set ranking to false and name their column as response (beside "
                "prompt or messages), or as messages where it holds whole conversations"
            )
    return entries


def _mixed(source: RowSource, rows: np.ndarray, mixture: Mixture) -> np.ndarray | None:
    """The rows of all data sets in the order of the mixture; None for a stream, which draws by itself."""
    if source.lazy:
        return None
    parts = []
    for entry, (begin, end) in zip(source.entries, source.entry_bounds(), strict=True):
        low, high = np.searchsorted(rows, [begin, end])
        parts.append(repeated(rows[low:high], entry.times))
        if not len(parts[-1]) and (len(source.entries) > 1 or entry.times < 1):
            raise DataError(f"data set '{entry.name}': no row is left of it to train on")
    return mixture.indices(parts)
