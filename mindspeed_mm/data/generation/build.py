"""Build the data sets of a generation model from data.json: find files, check first rows, split off validation rows."""

from __future__ import annotations

import numpy as np

from mindspeed_mm.configs.generation_data import GenerationDataConfig
from mindspeed_mm.data.generation.annotations import check_first_rows, open_annotations
from mindspeed_mm.data.generation.buckets import make_buckets
from mindspeed_mm.data.generation.dataset import GenerationDataset, ShapedDataset
from mindspeed_mm.data.generation.feature_dataset import open_features
from mindspeed_mm.data.generation.rule import GenerationRule
from mindspeed_mm.data.sources.splitting import split_rows

Datasets = tuple[ShapedDataset, ShapedDataset | None]


def build_generation_datasets(config: GenerationDataConfig, rule: GenerationRule) -> Datasets:
    """Build the training data set, and the validation data set if data.json asks for one.

    Args:
        config: Typed data.json.
        rule: The samples that the model takes; its seed decides which rows `val_rate` takes.

    Returns:
        (training, validation or None).

    Raises:
        ConfigError: A shape that the model can't take.
        DataError: A file or one of its first rows can't be used.
    """
    param = config.dataset_param
    basic = param.basic_parameters
    if param.dataset_type == "feature":
        whole: ShapedDataset = open_features(param, rule, basic.data_path, training=True)
    else:
        whole = _open_clips(config, rule, basic.data_path, training=True)
    if basic.val_data_path:
        if param.dataset_type == "feature":
            return whole, open_features(param, rule, basic.val_data_path, training=False)
        return whole, _open_clips(config, rule, basic.val_data_path, training=False)
    if basic.val_rate:
        train, valid = split_rows(whole.indices, basic.val_rate, rule.seed)
        return whole.part(train, training=True), whole.part(valid, training=False)
    return whole, None


def _open_clips(config: GenerationDataConfig, rule: GenerationRule, paths: list[str], training: bool) -> ShapedDataset:
    param = config.dataset_param
    pictures_only = param.dataset_type == "t2i"
    shapes = make_buckets(param.preprocess_parameters, rule, pictures_only, config.file)
    source = open_annotations(param.basic_parameters, paths)
    check_first_rows(source, pictures_only, param.basic_parameters.on_bad_sample == "skip")
    return GenerationDataset(source, param, rule, shapes, np.arange(len(source)), training)
