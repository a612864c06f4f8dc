"""The map-style data set of precomputed features."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

import numpy as np
import torch

from mindspeed_mm.configs.generation_data import GenerationDatasetParam
from mindspeed_mm.configs.scalars import show
from mindspeed_mm.data.generation.buckets import Bucket, LatentTable
from mindspeed_mm.data.generation.captions import is_left_out
from mindspeed_mm.data.generation.collate import GenerationSample
from mindspeed_mm.data.generation.dataset import ShapedDataset
from mindspeed_mm.data.generation.feature_files import EMPTY, FeatureReader
from mindspeed_mm.data.generation.rule import GenerationRule
from mindspeed_mm.utils.errors import BadSample, ConfigError, DataError

_DAMAGED = "features can't be read"
_TRIES = 64


def open_features(
    param: GenerationDatasetParam, rule: GenerationRule, paths: Sequence[str], training: bool
) -> FeatureDataset:
    """Open features as a data set.

    Args:
        param: `dataset_param`.
        rule: The samples that the model takes.
        paths: `data_path` or `val_data_path`: folders or index files; missing ones are searched for in
            `data_folder`.
        training: False for evaluation.

    Raises:
        ConfigError: Features of another model, or of shapes that the model can't take; captions are dropped, and
            there are no states of an empty one.
        DataError: There are no features, or they can't be read.
    """
    folder = param.basic_parameters.data_folder
    reader = FeatureReader([_placed(path, folder) for path in paths])
    _check_origin(reader, rule)
    for bucket in reader.buckets:
        if not rule.fits(*bucket):
            raise ConfigError(
                f"{reader.where(0)}: features of {bucket} (frames × height × width) can't be of {rule.made_by}, which "
                f"takes k·{rule.temporal_stride} + 1 frames and sides that are multiples of {rule.spatial_multiple}; "
                "make them with the model's own autoencoder"
            )
    dataset = FeatureDataset(reader, param, rule, training)
    dataset.check_dropout()
    return dataset


def _check_origin(reader: FeatureReader, rule: GenerationRule) -> None:
    """Raise if features are of another model, or lack the conditions of this one."""
    for key, wanted in rule.features_of.items():
        found = reader.made_from.get(key, wanted)
        if found != wanted:
            raise ConfigError(
                f"{reader.where(0)}: these features were made with {key} {show(found)}, and model.json says "
                f"{show(wanted)}; make them again with this model.json, or train with the one they were made with"
            )
    if rule.needs_conditions and not any(name.startswith("cond.") for name in reader.kinds()):
        raise ConfigError(
            f"{reader.where(0)}: these features have no tensor of a first frame ({', '.join(reader.kinds())}), which "
            "this model needs as a condition; make them again with this model.json"
        )


def _placed(path: str, folder: str) -> str:
    """A path as written, else in `data_folder`, else that folder."""
    if os.path.exists(path) or not folder:
        return path
    inside = os.path.join(folder, os.path.basename(path))
    return inside if os.path.exists(inside) else folder


class FeatureDataset(ShapedDataset):
    """Features as samples.

    A sample is `latents` [C, T', H', W'], `latents_std` where the posterior is drawn from, `text.<name>` (or `caption`,
    where captions weren't encoded) and `cond.<name>`, in their stored dtypes, with `row_id`, `sample_key` and
    `num_tokens`. Keys depend on the rows of the features' clips, so that training on features draws the same random
    numbers as training on the clips.

    A batch that mixes shapes is cut: to the first latent frames, and to the middle of the picture.

    Args:
        reader: The features.
        param: `dataset_param`.
        rule: The samples that the model takes.
        training: False for evaluation: captions are whole.
    """

    shapes: LatentTable

    def __init__(
        self, reader: FeatureReader, param: GenerationDatasetParam, rule: GenerationRule, training: bool = True
    ) -> None:
        super().__init__(param, rule, LatentTable(reader.buckets), np.arange(len(reader)), training)
        self.reader = reader
        self._empty: dict[str, torch.Tensor] | None = None
        encoded = any(name.startswith("text.") for name in reader.kinds())
        self._captions = None if encoded else reader.captions()

    def check_dropout(self) -> None:
        """Check that there are text states of an empty caption, if captions are dropped.

        Raises:
            ConfigError: There are none.
        """
        states = {name for name in self.reader.kinds() if name.startswith("text.")}
        if self.text_dropout and not states <= self._states_of_nothing().keys():
            raise ConfigError(
                f"{self.reader.directories[0] / EMPTY}: captions are left out with a probability of "
                f"{self.text_dropout:g}, and there are no text states of an empty caption; make the features anew, or "
                "set dataset_param.preprocess_parameters.cfg (or ucg_rate in model.json) to 0"
            )

    def warm_up(self) -> None:
        """Read the states of an empty caption, so that workers share them."""
        self._states_of_nothing()

    def _states_of_nothing(self) -> dict[str, torch.Tensor]:
        if self._empty is None:
            self._empty = self.reader.empty() or {}
        return self._empty

    def _number(self, row: int) -> int:
        return int(self.reader.rows[row])

    def _name(self, row: int) -> str:
        return self.reader.where(row)

    def _bucket(self, row: int) -> int:
        return int(self.reader.shapes[row])

    def _make(self, row: int, bucket: int, key: int) -> GenerationSample:
        try:
            tensors = self.reader.read(row)
        except DataError as error:
            raise BadSample(str(error), _DAMAGED) from None
        left_out = is_left_out(key, self.text_dropout)
        sample: GenerationSample = dict(tensors)
        if self._captions is not None:
            sample["caption"] = "" if left_out else self._captions[row]
        elif left_out:
            sample.update(self._states_of_nothing())
        own, wanted = self.shapes[self._bucket(row)], self.shapes[bucket]
        return sample if own == wanted else _cut(sample, own, wanted, self.rule)

    def _filler(self, bucket: int) -> GenerationSample:
        """Zeros of the shapes that a sample has, and the states of an empty caption."""
        own = bucket if bucket < self.shapes.own else 0
        states = self._states_of_nothing()
        tensors = {
            name: states[name] if name in states else torch.zeros_like(tensor)
            for name, tensor in self._example(own).items()
        }
        sample: GenerationSample = dict(tensors) if self._captions is None else {**tensors, "caption": ""}
        return _cut(sample, self.shapes[own], self.shapes[bucket], self.rule, grows=True)

    def _example(self, bucket: int) -> dict[str, torch.Tensor]:
        """The tensors of a sample of a bucket: the first one whose file can be read."""
        *others, last = np.flatnonzero(self.reader.shapes == bucket)[:_TRIES].tolist()
        for index in others:
            with contextlib.suppress(DataError):
                return self.reader.read(index)
        return self.reader.read(last)


def _cut(
    sample: GenerationSample, own: Bucket, wanted: Bucket, rule: GenerationRule, grows: bool = False
) -> GenerationSample:
    """Cut latents, and conditions on the same grid, to a shape: its first frames, the middle of its picture.

    Args:
        sample: Tensors and caption.
        own: The sample's shape in pixels.
        wanted: The shape to cut to.
        rule: Gives the frames of a latent frame.
        grows: Shapes may be larger than the sample's; padding is zero.
    """
    frames, height, width = sample["latents"].shape[1:]
    grid = _latent_frames(wanted, rule), height * wanted.height // own.height, width * wanted.width // own.width
    cut = dict(sample)
    for name, tensor in sample.items():
        if name.startswith("text.") or not isinstance(tensor, torch.Tensor) or tensor.dim() != 4:
            continue
        if tensor.shape[2:] != (height, width):  # not on this grid
            continue
        size = (grid[0] if tensor.shape[1] == frames else tensor.shape[1], *grid[1:])
        if grows:
            cut[name] = tensor.new_zeros((len(tensor), *size))
            continue
        top, left = (height - size[1]) // 2, (width - size[2]) // 2
        cut[name] = tensor[:, : size[0], top : top + size[1], left : left + size[2]].contiguous()
    return cut


def _latent_frames(bucket: Bucket, rule: GenerationRule) -> int:
    return (bucket.frames - 1) // rule.temporal_stride + 1
