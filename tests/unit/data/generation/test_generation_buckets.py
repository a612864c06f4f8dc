"""Which shapes there are, and which one a clip gets."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from mindspeed_mm.data.generation.buckets import Bucket, BucketTable, LatentTable, make_buckets
from mindspeed_mm.utils.errors import ConfigError
from tests.unit.data.generation.generation_maker import RULE, config


def made(pictures_only: bool = False, rule: Any = RULE, **keys: Any) -> list[tuple[int, int, int]]:
    param = config("x.json", **keys).dataset_param.preprocess_parameters
    return [tuple(bucket) for bucket in make_buckets(param, rule, pictures_only).buckets]


def test_one_bucket_without_a_word() -> None:
    assert made(num_frames=81, max_height=480, max_width=832) == [(81, 480, 832)]
    assert made(True, num_frames=81, max_height=480, max_width=832) == [(1, 480, 832)]


def test_frames_that_the_model_takes(said: list[str]) -> None:
    param = config("x.json").dataset_param.preprocess_parameters
    assert param.num_frames == 9
    absent = param.model_copy(update={"num_frames": 16})
    absent.model_fields_set.discard("num_frames")
    assert [tuple(bucket) for bucket in make_buckets(absent, RULE, False).buckets] == [(13, 32, 64)]
    assert "num_frames is absent: clips have 13 frames of 16: an autoencoder takes k·4 + 1 frames" in said[0]
    with pytest.raises(ConfigError, match=r"num_frames is 80; .* takes k·4 \+ 1 frames.*; the nearest are 77 and 81"):
        made(num_frames=80)


def test_fewer_frames_by_halves() -> None:
    assert [shape[0] for shape in made(num_frames=81, min_num_frames=5)] == [81, 41, 21, 9, 5]
    assert [shape[0] for shape in made(num_frames=81, min_num_frames=30)] == [81, 41, 33]
    assert [shape[0] for shape in made(num_frames=81, min_num_frames=81)] == [81]
    assert [shape[0] for shape in made(num_frames=17, min_num_frames=1)] == [17, 9, 5, 1]
    anything = dataclasses.replace(RULE, temporal_stride=1)
    assert [shape[0] for shape in made(rule=anything, num_frames=16, min_num_frames=3)] == [16, 8, 4, 3]


def test_a_ladder_of_ratios() -> None:
    keys = {"force_resolution": False, "max_hxw": 399360, "hw_stride": 8, "hw_aspect_thr": 2.0, "num_frames": 1}
    shapes = made(**keys)
    assert len(shapes) == len(set(shapes)) == 11
    assert all(RULE.fits(*shape) and shape[1] * shape[2] <= 399360 for shape in shapes)
    assert all(shape[1] * shape[2] > 0.9 * 399360 for shape in shapes)
    ratios = sorted(shape[1] / shape[2] for shape in shapes)
    assert 0.49 < ratios[0] < 0.51 and 1.9 < ratios[-1] < 2.1 and (1, 480, 832) in shapes
    assert len(made(**{**keys, "hw_stride": 64})) < 12 and all(
        s[1] % 64 == 0 for s in made(**{**keys, "hw_stride": 64})
    )
    assert made(**{**keys, "force_resolution": True}) == [(1, 32, 64)]
    with pytest.raises(ConfigError, match=r"max_hxw is 100; a side has at least 16 pixels: 256"):
        made(**{**keys, "max_hxw": 100})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"max_height": 100}, r"max_height × max_width is 100×64; .* multiples of 16; the nearest is 96×64"),
        ({"buckets": [[9, 32, 64], [10, 32, 70]]}, r"buckets: \[10, 32, 70\].*the nearest is \[9, 32, 64\]"),
    ],
)
def test_shapes_that_the_model_can_not_take(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(**keys)
    with pytest.raises(ConfigError, match=r"pictures have one frame; write \[1, 32, 64\]"):
        made(True, buckets=[[9, 32, 64]])


TABLE = BucketTable(
    [Bucket(*shape) for shape in [(9, 32, 64), (9, 64, 32), (5, 32, 64), (5, 48, 48), (5, 96, 96), (1, 32, 64)]]
)


@pytest.mark.parametrize(
    ("clip", "bucket"),
    [
        ((100, 720, 1280), 0),
        ((100, 1280, 720), 1),
        ((100, 700, 710), 0),
        ((8, 700, 710), 4),
        ((8, 60, 61), 3),
        ((5, 300, 500), 2),
        ((4, 1000, 10), 5),
        ((1, 10, 10), 5),
        ((0, 10, 10), None),
    ],
)
def test_the_bucket_of_a_clip(clip: tuple[int, int, int], bucket: int | None) -> None:
    assert TABLE.choose(*clip) == bucket


def test_what_mixed_clips_have_in_common() -> None:
    assert TABLE.common([1, 1, 1]) == 1
    assert TABLE.common([0, 5]) == 5  # the fewest frames
    assert TABLE.common([0, 2]) == 2 and TABLE.common([1, 0, 3]) == 3
    for mixed in ([0, 1, 2, 3], [4, 5], [1, 5, 0]):
        fewest = min(TABLE[number].frames for number in mixed)
        assert TABLE[TABLE.common(mixed)].frames <= fewest


def test_what_mixed_latents_have_in_common() -> None:
    table = LatentTable([Bucket(9, 32, 64), Bucket(5, 64, 32)])
    assert table.own == 2 and len(table) == 8
    assert table.common([0, 0]) == 0
    assert table[table.common([0, 1])] == (5, 32, 32)
