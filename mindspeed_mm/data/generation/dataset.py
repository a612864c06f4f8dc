"""The map-style data set of captioned clips and pictures."""

from __future__ import annotations

import copy
import traceback
from abc import ABC, abstractmethod
from typing import Any, NoReturn

import numpy as np
import torch
import xxhash
from torch.utils.data import Dataset

from mindspeed_mm.configs.generation_data import GenerationDatasetParam
from mindspeed_mm.data.generation.annotations import Annotation, read_annotation
from mindspeed_mm.data.generation.buckets import Bucket, BucketTable
from mindspeed_mm.data.generation.captions import choose, clean, is_left_out
from mindspeed_mm.data.generation.clips import TOO_SHORT, ClipGeometry, ClipReader
from mindspeed_mm.data.generation.collate import GenerationSample, collate
from mindspeed_mm.data.generation.rule import GenerationRule
from mindspeed_mm.data.generation.transforms import check_values, covered, transformed
from mindspeed_mm.data.loading.identity import hash_of, stamp
from mindspeed_mm.data.media.media import SampleSize
from mindspeed_mm.data.media.media_files import MediaFile, find_media
from mindspeed_mm.data.places import Place
from mindspeed_mm.data.plan.plan import FILLER
from mindspeed_mm.data.sources.files import RowSource
from mindspeed_mm.utils.errors import BadSample, DataError, MMError
from mindspeed_mm.utils.extras import require_extra
from mindspeed_mm.utils.sample_random import sample_key, uniform


class ShapedDataset(Dataset, ABC):
    """Base of the data sets of clips and of features: rows, buckets, keys, faults.

    All randomness of a sample comes from its key, which depends on the run's seed, its row and the epoch; in
    evaluation the epoch is 0, and no caption is left out.

    Args:
        param: `dataset_param`.
        rule: The samples that the model takes.
        shapes: The buckets.
        indices: Rows that belong to this data set, [rows] int64.
        training: False for evaluation.
    """

    has_fillers = True
    names_epochs = True

    def __init__(
        self,
        param: GenerationDatasetParam,
        rule: GenerationRule,
        shapes: BucketTable,
        indices: np.ndarray,
        training: bool,
    ) -> None:
        self.dataset_param = param
        self.rule = rule
        self.shapes = shapes
        self.indices = indices
        self.training = training

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> GenerationSample:
        return self.get(index, self.bucket_of(index) or 0)

    def get(self, index: int, piece: int = 0, epoch: int = 0) -> GenerationSample:
        """Return a sample.

        Args:
            index: Row of this data set; -1 is a filler.
            piece: Number of its bucket.
            epoch: Passes over the data before this one.

        Returns:
            See `collate`. A row that can't be used is a filler, with `fault` (the reason, to count by) and `note`.

        Raises:
            BadSample: The row can't be used, and `on_bad_sample` is raise.
            DataError: Any other error of the row, with its place and a traceback.
        """
        if index == FILLER:
            return self._finished(self._filler(piece), FILLER, 0, piece)
        row = self._row(index)
        key = sample_key(self.rule.seed, self._number(row), epoch if self.training else 0)
        try:
            return self._finished(self._make(row, piece, key), index, key, piece)
        except BadSample as error:
            if self._raises:
                raise
            filler = self._finished(self._filler(piece), FILLER, 0, piece)
            return {**filler, "note": str(error), "fault": error.reason}
        except MMError:
            raise
        except Exception as error:
            self._unforeseen(row, error)

    def measure(self, index: int) -> list[SampleSize]:
        """Return a row's tokens and bucket, without decoding anything; one entry.

        Raises:
            BadSample: The row can't be used, and `on_bad_sample` is raise.
        """
        row = self._row(index)
        try:
            bucket = self._bucket(row)
        except BadSample as error:
            if self._raises:
                raise
            return [SampleSize(0, fault=error.reason)]
        except MMError:
            raise
        except Exception as error:
            self._unforeseen(row, error)
        return [SampleSize(self.rule.tokens(*self.shapes[bucket]), bucket=bucket)]

    def sizes_key(self) -> str | None:
        """A hash of everything that determines what `measure` returns, media files apart; None: it is quickly found."""
        return None

    def bucket_of(self, index: int) -> int | None:
        """Return the number of a row's bucket; None: it gives no sample. With one bucket no row is read."""
        return 0 if index == FILLER or len(self.shapes) == 1 else self.measure(index)[0].bucket

    def part(self, indices: np.ndarray, training: bool) -> ShapedDataset:
        """Return the data set of some of the rows, [rows] int64."""
        other = copy.copy(self)
        other.indices, other.training = indices, training
        return other

    def where(self, index: int) -> str:
        """Name a row, for messages."""
        return self._name(self._row(index))

    def collate_fn(self, samples: list[GenerationSample]) -> dict[str, Any]:
        """Collate samples of one bucket."""
        return collate(samples)

    @property
    def text_dropout(self) -> float:
        """Share of captions that are left out: model.json's, else data.json's; in evaluation none."""
        if not self.training:
            return 0.0
        given = self.rule.text_dropout
        return self.dataset_param.preprocess_parameters.cfg if given is None else given

    @property
    def _raises(self) -> bool:
        return self.dataset_param.basic_parameters.on_bad_sample == "raise"

    def _row(self, index: int) -> int:
        if not 0 <= index < len(self.indices):
            raise IndexError(f"row {index} of {len(self.indices)}")
        return int(self.indices[index])

    def _finished(self, sample: GenerationSample, index: int, key: int, bucket: int) -> GenerationSample:
        tokens = self.rule.tokens(*self.shapes[bucket])
        return {**sample, "row_id": index, "sample_key": key, "num_tokens": tokens}

    def _unforeseen(self, row: int, error: Exception) -> NoReturn:
        message = f"{self._name(row)}: {type(error).__name__}: {error}\n{traceback.format_exc()}"
        raise DataError(message) from error

    def _number(self, row: int) -> int:
        """The number that identifies a row in its key."""
        return row

    @abstractmethod
    def _name(self, row: int) -> str:
        """Name a row, for messages."""

    @abstractmethod
    def _bucket(self, row: int) -> int:
        """The number of a row's bucket."""

    @abstractmethod
    def _make(self, row: int, bucket: int, key: int) -> GenerationSample:
        """A row as a sample of a bucket."""

    @abstractmethod
    def _filler(self, bucket: int) -> GenerationSample:
        """A sample of a bucket without a weight in the loss."""


class GenerationDataset(ShapedDataset):
    """Rows of annotation files as clips with captions.

    A sample is `video` [3, frames, height, width] float32 in [-1, 1] (a picture has one frame) and `caption`, with
    `row_id`, `sample_key` and `num_tokens`. Instances can be pickled and forked.

    Args:
        source: The rows.
        param: `dataset_param`.
        rule: The samples that the model takes.
        shapes: The buckets.
        indices: Rows of `source` that belong to this data set, [rows] int64; None: all.
        training: False for evaluation: clips begin in the middle, and captions are whole.

    Raises:
        ConfigError: Values other than from -1 to 1 come out of `train_pipeline`.
    """

    def __init__(
        self,
        source: RowSource,
        param: GenerationDatasetParam,
        rule: GenerationRule,
        shapes: BucketTable,
        indices: np.ndarray | None = None,
        training: bool = True,
    ) -> None:
        super().__init__(param, rule, shapes, np.arange(len(source)) if indices is None else indices, training)
        if param.dataset_type != "t2i":
            require_extra("video", f"dataset_param.dataset_type '{param.dataset_type}' of clips")
        self.source = source
        self._reader = ClipReader(param.preprocess_parameters)
        self._pictures_only = param.dataset_type == "t2i"
        pipeline = param.preprocess_parameters.train_pipeline
        self._steps = {"image": pipeline.image, "video": pipeline.of_clips}
        for kind, steps in self._steps.items():
            if steps is not None:
                check_values(steps, kind)

    def warm_up(self) -> None:
        """Import the packages that workers need, so that they share them."""
        import PIL.Image  # noqa: F401

        if not self._pictures_only:
            import av  # noqa: F401

        if any(steps is not None for steps in self._steps.values()):
            import torchvision.transforms.v2.functional  # noqa: F401

    def sizes_key(self) -> str:
        """A hash of everything that determines what `measure` returns, media files apart."""
        return hash_of(
            {
                "buckets": 1,
                "rows": [stamp(file.path) for file in self.source.files],
                "entries": [repr(entry) for entry in self.source.entries],
                "param": self.dataset_param.model_dump(),
                "rule": repr(self.rule),
                "shapes": list(map(repr, self.shapes.buckets)),
                "indices": xxhash.xxh3_64_hexdigest(np.ascontiguousarray(self.indices)),
            }
        )

    def _name(self, row: int) -> str:
        return self.source.where(row)

    def _bucket(self, row: int) -> int:
        annotation, file = self._open(row)
        facts = self._reader.facts(annotation, file)
        return self._judge(row, file, facts)

    def _open(self, row: int) -> tuple[Annotation, MediaFile]:
        place = Place(self.source, row)
        annotation = read_annotation(self.source.row(row), self._pictures_only, place)
        return annotation, find_media(annotation.ref, self.source.folders(row), place)

    def _judge(self, row: int, file: MediaFile, facts: ClipGeometry) -> int:
        """The bucket of a clip; raises BadSample if data.json excludes it."""
        param, shapes = self.dataset_param.preprocess_parameters, self.shapes
        if facts.width * facts.height < param.min_hxw:
            raise file.fault(f"is {facts.width}×{facts.height} pixels, fewer than min_hxw {param.min_hxw}", "too small")
        most = max(bucket.frames for bucket in shapes.buckets)
        frames = self._reader.frames(facts, most)
        bucket = shapes.choose(frames, facts.height, facts.width)
        if bucket is None:
            raise file.fault(f"gives {frames} frames, and {shapes.fewest_frames} are needed", TOO_SHORT)
        self._check_ratio(file, facts, shapes[bucket])
        share = param.drop_short_ratio
        if frames < most and facts.spacing and uniform(sample_key(self.rule.seed, row, 0), "short") < share:
            raise file.fault(f"gives {frames} frames of {most} (drop_short_ratio {share:g})", "short clip dropped")
        return bucket

    def _check_ratio(self, file: MediaFile, facts: ClipGeometry, bucket: Bucket) -> None:
        limit = self.dataset_param.preprocess_parameters.hw_aspect_thr
        if limit is None:
            return
        sizes = {(shape.height, shape.width) for shape in self.shapes.buckets}
        wanted = bucket.height / bucket.width if len(sizes) == 1 else 1.0
        off = facts.height / facts.width / wanted
        if max(off, 1 / off) > limit + 1e-6:
            raise file.fault(
                f"is {facts.width}×{facts.height} pixels: its ratio is {max(off, 1 / off):.2f} times off, more than "
                f"hw_aspect_thr {limit:g}",
                "sides too unequal",
            )

    def _make(self, row: int, bucket: int, key: int) -> GenerationSample:
        annotation, file = self._open(row)
        clip = self._reader.look(annotation, file)
        self._judge(row, file, clip.facts)
        shape, kind = self.shapes[bucket], annotation.ref.kind
        steps = self._steps[kind]
        place = uniform(key, "start") if self.training else None
        frames = self._reader.read(clip, shape, place, covers=steps is None)
        video = covered(frames, shape) if steps is None else transformed(frames, steps, shape, kind)
        return {"video": video, "caption": self._caption(annotation.captions, key)}

    def _caption(self, captions: tuple[str, ...], key: int) -> str:
        if is_left_out(key, self.text_dropout):
            return ""
        caption = choose(captions, key)
        param = self.dataset_param
        return clean(caption, param.text_preprocess_methods) if param.enable_text_preprocessing else caption

    def _filler(self, bucket: int) -> GenerationSample:
        return {"video": torch.zeros(3, *self.shapes[bucket]), "caption": ""}
