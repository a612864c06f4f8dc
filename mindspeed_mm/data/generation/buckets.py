"""Buckets: the shapes [frames, height, width] of samples, and the bucket of a clip.

**A clip's bucket.** Of the buckets with no more frames than the clip can give, those with the most; of these the one
with the least 2·|log(aspect ÷ aspect of the clip)| + ¼·|log(area ÷ area of the clip)|.

**The bucket of a mixed batch.** The same rule for the fewest frames and the mean (of logarithms) sides of its samples:
frames can be left out, and any picture can be scaled and cut.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from mindspeed_mm.configs.generation_data import GenerationPreprocessParameters
from mindspeed_mm.configs.generation_steps import fixed_size
from mindspeed_mm.data.generation.rule import GenerationRule
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.log import notice

_KEYS = "dataset_param.preprocess_parameters"
#: aspect ratios of a ladder, and their inverses
_RATIOS = (1.0, 5 / 4, 4 / 3, 3 / 2, 16 / 9, 2.0, 21 / 9, 3.0, 4.0, 5.0)
_CLOSE = 1e-6


class Bucket(NamedTuple):
    """A shape: frames, and height and width in pixels."""

    frames: int
    height: int
    width: int

    def __str__(self) -> str:
        return f"{self.frames}×{self.height}×{self.width}"


class BucketTable:
    """The buckets of a data set, by number.

    Args:
        buckets: Distinct shapes.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = tuple(buckets)

    def __len__(self) -> int:
        return len(self.buckets)

    def __getitem__(self, number: int) -> Bucket:
        return self.buckets[number]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BucketTable) and self.buckets == other.buckets

    def __hash__(self) -> int:
        return hash(self.buckets)

    @property
    def fewest_frames(self) -> int:
        """Frames of the shortest bucket."""
        return min(bucket.frames for bucket in self.buckets)

    def choose(self, frames: int, height: float, width: float) -> int | None:
        """Return the number of the bucket of a clip; None if it has too few frames for any.

        Args:
            frames: Frames that it can give.
            height, width: Its sides in pixels.
        """
        most = max((bucket.frames for bucket in self.buckets if bucket.frames <= frames), default=None)
        if most is None:
            return None
        distances = [
            (_distance(bucket, height, width), number)
            for number, bucket in enumerate(self.buckets)
            if bucket.frames == most
        ]
        return min(distances)[1]

    def rank(self, bucket: int) -> tuple[float, ...]:
        """Return the sort key of a bucket: frames, then aspect ratio, then area."""
        frames, height, width = self.buckets[bucket]
        return frames, height / width, height * width, bucket

    def common(self, buckets: Sequence[int]) -> int:
        """Return the bucket to which samples of all these can be cut."""
        if len(set(buckets)) == 1:
            return buckets[0]
        shapes = [self.buckets[number] for number in buckets]
        height, width = (math.exp(sum(math.log(s[axis]) for s in shapes) / len(shapes)) for axis in (1, 2))
        found = self.choose(min(shape.frames for shape in shapes), height, width)
        assert found is not None, "one of the samples has the fewest frames"
        return found


class LatentTable(BucketTable):
    """Shapes of latents, which can't be scaled: samples of several shapes are cut to the part within all of them.

    A batch that mixes shapes is cut to the fewest frames, the least height and the least width. The table has all of
    these shapes; the first `own` of them are those of samples.

    Args:
        buckets: Distinct shapes of samples.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.own = len(buckets)
        grid = itertools.product(*(sorted({bucket[axis] for bucket in buckets}) for axis in range(3)))
        own = set(buckets)
        super().__init__([*buckets, *(Bucket(*shape) for shape in grid if shape not in own)])
        self._numbers = {bucket: number for number, bucket in enumerate(self.buckets)}

    def common(self, buckets: Sequence[int]) -> int:
        """Return the largest shape within all of these."""
        shapes = [self.buckets[number] for number in buckets]
        return self._numbers[Bucket(*(min(shape[axis] for shape in shapes) for axis in range(3)))]


def _distance(bucket: Bucket, height: float, width: float) -> float:
    aspect = math.log(bucket.height / bucket.width) - math.log(height / width)
    area = math.log(bucket.height * bucket.width) - math.log(height * width)
    return round(2 * abs(aspect) + 0.25 * abs(area), 9)


def make_buckets(
    param: GenerationPreprocessParameters, rule: GenerationRule, pictures_only: bool, file: str = "data.json"
) -> BucketTable:
    """Return the buckets that data.json describes.

    Args:
        param: `preprocess_parameters`.
        rule: The shapes that the model takes.
        pictures_only: Of a data set of pictures: one frame.
        file: Name of data.json, for messages.

    Raises:
        ConfigError: Frames or a shape that the model can't take, with the nearest that it can.
    """
    if param.buckets is not None:
        shapes = [Bucket(*shape) for shape in param.buckets]
        key = f"{file}: {_KEYS}.buckets"
        for shape in shapes:
            if not rule.fits(*shape):
                raise ConfigError(f"{key}: {list(shape)}: {_demand(rule)}; the nearest is {_nearest(shape, rule)}")
            if pictures_only and shape.frames != 1:
                raise ConfigError(f"{key}: {list(shape)}: pictures have one frame; write {[1, *shape[1:]]}")
        return BucketTable(shapes)
    frames = [1] if pictures_only else _frame_ladder(param, rule, file)
    sides = _sides(param, rule, pictures_only, file)
    return BucketTable([Bucket(count, *size) for count in frames for size in sides])


def _demand(rule: GenerationRule) -> str:
    return (
        f"{rule.made_by} takes k·{rule.temporal_stride} + 1 frames, and sides that are multiples of "
        f"{rule.spatial_multiple}"
    )


def _nearest(shape: Bucket, rule: GenerationRule) -> list[int]:
    stride, multiple = rule.temporal_stride, rule.spatial_multiple
    sides = [max(1, round(side / multiple)) * multiple for side in shape[1:]]
    return [round((shape.frames - 1) / stride) * stride + 1, *sides]


def _around(side: int, rule: GenerationRule) -> str:
    """A side that fits, or the nearest ones below and above."""
    below = side // rule.spatial_multiple * rule.spatial_multiple
    if below == side:
        return str(side)
    return f"{below} or {below + rule.spatial_multiple}" if below else str(rule.spatial_multiple)


def _frame_ladder(param: GenerationPreprocessParameters, rule: GenerationRule, file: str) -> list[int]:
    """The most frames, half of them and so on, down to the fewest."""
    most = rule.frames_near(param.num_frames)
    if most != param.num_frames:
        if "num_frames" in param.model_fields_set:
            above = most + rule.temporal_stride
            raise ConfigError(
                f"{file}: {_KEYS}.num_frames is {param.num_frames}; {_demand(rule)}; the nearest are {most} and {above}"
            )
        notice(f"{file}: {_KEYS}.num_frames is absent: clips have {most} frames of {param.num_frames}: {_demand(rule)}")
    if param.min_num_frames is None or most == 1:
        return [most]
    fewest = -(-(param.min_num_frames - 1) // rule.temporal_stride) * rule.temporal_stride + 1
    ladder = [most]
    while ladder[-1] > fewest:
        ladder.append(max(rule.frames_near((ladder[-1] + 1) // 2), fewest))
    return ladder


def _sides(
    param: GenerationPreprocessParameters, rule: GenerationRule, pictures_only: bool, file: str
) -> list[tuple[int, int]]:
    pipeline = param.train_pipeline
    fixed = fixed_size(pipeline.image if pictures_only else pipeline.of_clips)
    area = None if param.force_resolution else param.max_hxw
    if fixed is not None:
        if fixed != (param.max_height, param.max_width):
            named = f"{fixed[0]}×{fixed[1]} pixels are named by train_pipeline and taken; to use buckets, max_height "
            notice(f'{file}: {_KEYS}: {named}and max_width write the size "auto"')
        return [_one_size(*fixed, rule, f"{file}: the size that {_KEYS}.train_pipeline names")]
    if area is None:
        return [_one_size(param.max_height, param.max_width, rule, f"{file}: {_KEYS}: max_height × max_width")]
    return _ladder(area, param, rule, file)


def _one_size(height: int, width: int, rule: GenerationRule, what: str) -> tuple[int, int]:
    shape = Bucket(1, height, width)
    if not rule.fits(*shape):
        near = _nearest(shape, rule)[1:]
        raise ConfigError(
            f"{what} is {height}×{width}; {_demand(rule)}; the nearest is {near[0]}×{near[1]} ({_around(height, rule)} "
            f"high, {_around(width, rule)} wide)"
        )
    return height, width


def _ladder(area: int, param: GenerationPreprocessParameters, rule: GenerationRule, file: str) -> list[tuple[int, int]]:
    """Sizes of common aspect ratios, each as large as `max_hxw` allows."""
    multiple = math.lcm(param.hw_stride, rule.spatial_multiple)
    widest = param.hw_aspect_thr or max(_RATIOS)
    if area < multiple**2:
        raise ConfigError(f"{file}: {_KEYS}.max_hxw is {area}; a side has at least {multiple} pixels: {multiple**2}")
    sizes: list[tuple[int, int]] = []
    for ratio in (*(1 / ratio for ratio in reversed(_RATIOS[1:])), *_RATIOS):
        if max(ratio, 1 / ratio) > widest + _CLOSE:
            continue
        size = _largest(area, ratio, multiple)
        if size not in sizes:
            sizes.append(size)
    return sizes


def _largest(area: int, ratio: float, multiple: int) -> tuple[int, int]:
    """The size nearest to a ratio of height to width whose area is at most `area`."""
    wanted = math.sqrt(area * ratio)
    heights = {max(1, math.floor(wanted / multiple)), max(1, math.ceil(wanted / multiple))}
    sizes = []
    for height in sorted(number * multiple for number in heights):
        width = area // height // multiple * multiple
        if width:
            sizes.append((height, width))
    return min(sizes, key=lambda size: abs(math.log(size[0] / size[1] / ratio)))
