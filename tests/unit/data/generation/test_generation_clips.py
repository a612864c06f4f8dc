"""Clips as samples: which frames, which pixels, which faults."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mindspeed_mm.data.generation import captions
from mindspeed_mm.data.generation.dataset import GenerationDataset
from mindspeed_mm.utils.errors import BadSample, ConfigError, DataError
from mindspeed_mm.utils.sample_random import sample_key
from tests.support.clips import read_number, write_clip
from tests.unit.data.generation.generation_maker import RULE, opened, write_rows


def numbers(video: torch.Tensor) -> list[int]:
    """The numbers of the frames of a sample [3, frames, height, width]."""
    pixels = ((video.permute(1, 2, 3, 0) + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).numpy()
    return [read_number(picture) for picture in pixels]


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clips")
    write_clip(folder / "long.mp4", frames=48, rate=24)
    write_clip(folder / "short.mp4", frames=6, rate=24)
    write_clip(folder / "turned.mp4", frames=12, rate=24, rotation=90)
    # every third frame lasts three times as long
    begins = np.cumsum([0.0] + [0.12 if number % 3 == 2 else 0.04 for number in range(29)])
    write_clip(folder / "uneven.mkv", times=begins.tolist(), rate=25)
    (folder / "broken.mp4").write_bytes(b"<html>not found</html>" * 50)
    halves = Image.new("RGB", (200, 100), "red")
    halves.paste("blue", (0, 50, 200, 100))
    halves.save(folder / "red.png")
    Image.new("RGB", (64, 128), "blue").save(folder / "blue.jpg")
    return folder


def one(clips: Path, name: str, kind: str = "t2v", row: Any = None, **keys: Any) -> GenerationDataset:
    path = write_rows(clips / f"{name}.{len(list(clips.iterdir()))}.json", [{"path": name, "cap": "a", **(row or {})}])
    dataset = opened(path, kind, basic_data_folder=str(clips), **keys)
    assert isinstance(dataset, GenerationDataset)
    return dataset


def test_a_sample(clips: Path) -> None:
    sample = one(clips, "long.mp4", zero_start=True)[0]
    video = sample["video"]
    assert (video.shape, video.dtype) == ((3, 9, 32, 64), torch.float32)
    assert -1 <= float(video.min()) < -0.7 and 0.7 < float(video.max()) <= 1
    assert (sample["caption"], sample["row_id"], sample["sample_key"]) == ("a", 0, sample_key(7, 0, 0))
    assert sample["num_tokens"] == 3 * 2 * 4
    assert numbers(video) == list(range(9))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"train_fps": 12}, range(0, 18, 2)),
        ({"train_fps": 100}, range(9)),  # no frame twice
        ({"frame_interval": 3}, range(0, 27, 3)),
        ({"train_fps": 24, "frame_interval": 2, "speed_factor": 2.0}, range(0, 36, 4)),
        ({"train_fps": 24, "keep_last": True, "zero_start": False}, range(39, 48)),
        ({"frame_interval": 12, "auto_interval": True}, [0, 5, 10, 16, 21, 26, 32, 37, 42]),  # 48 ÷ 9 frames a step
    ],
)
def test_which_frames(clips: Path, keys: dict[str, Any], expected: Any) -> None:
    dataset = one(clips, "long.mp4", **{"zero_start": True, **keys})
    assert numbers(dataset[0]["video"]) == list(expected)


def test_a_clip_begins_where_its_key_says(clips: Path) -> None:
    dataset = one(clips, "long.mp4")
    begins = [numbers(dataset.get(0, 0, epoch)["video"])[0] for epoch in range(12)]
    assert len(set(begins)) > 4 and max(begins) <= 39
    assert all(numbers(dataset.get(0, 0, e)["video"]) == list(range(b, b + 9)) for e, b in enumerate(begins[:3]))
    assert begins == [numbers(dataset.get(0, 0, epoch)["video"])[0] for epoch in range(12)]
    evaluation = dataset.part(dataset.indices, training=False)
    first, later = evaluation.get(0, 0, 0), evaluation.get(0, 0, 5)
    assert numbers(first["video"]) == numbers(later["video"]) == list(range(20, 29))  # the middle
    assert first["sample_key"] == later["sample_key"]


def test_a_cut_and_a_crop(clips: Path) -> None:
    dataset = one(clips, "long.mp4", row={"cut": [30, 39]})
    assert {tuple(numbers(dataset.get(0, 0, epoch)["video"])) for epoch in range(4)} == {tuple(range(30, 39))}
    with pytest.raises(BadSample, match=r"gives 8 frames, and 9 are needed"):
        one(clips, "long.mp4", row={"cut": [40, 60]}, basic_on_bad_sample="raise")[0]
    # the left half of the upper half of frame 1: bits 0 … 3 as columns, the first one bright
    sample = one(clips, "long.mp4", row={"crop": [0, 64, 0, 32], "cut": [1, 10]}, zero_start=True)[0]
    columns = sample["video"][:, 0].mean(dim=(0, 1)).reshape(4, 16).mean(1)
    assert columns[0] > 0.5 and columns[1:].max() < -0.5
    with pytest.raises(BadSample, match=r"'crop' \[0, 300, 0, 10\] reaches out of the picture, which has 128×64"):
        one(clips, "long.mp4", row={"crop": [0, 300, 0, 10]}, basic_on_bad_sample="raise")[0]


def test_uneven_frames_come_by_their_own_times(clips: Path) -> None:
    """Ten a second, of a clip that shows some frames three times as long as others."""
    begins = np.cumsum([0.0] + [0.12 if number % 3 == 2 else 0.04 for number in range(29)])
    expected = [int(np.searchsorted(begins, number / 10 + 0.003, side="right")) - 1 for number in range(13)]
    assert expected[:7] == [0, 2, 3, 5, 6, 8, 9] and set(np.diff(expected)) == {1, 2}
    dataset = one(clips, "uneven.mkv", train_fps=10, zero_start=True, num_frames=13)
    assert numbers(dataset[0]["video"]) == expected


def test_a_turned_clip_is_upright(clips: Path) -> None:
    dataset = one(clips, "turned.mp4", buckets=[[9, 64, 32], [9, 32, 64]])
    assert dataset.bucket_of(0) == 0  # taller than wide
    assert dataset.get(0, 0)["video"].shape == (3, 9, 64, 32)


def test_pictures(clips: Path) -> None:
    picture = one(clips, "red.png", "t2i", num_frames=81)[0]["video"]
    assert picture.shape == (3, 1, 32, 64)
    assert torch.equal(picture[:, 0, 5, 5], torch.tensor([1.0, -1.0, -1.0]))
    assert torch.equal(picture[:, 0, 28, 60], torch.tensor([-1.0, -1.0, 1.0]))
    # among clips, where a bucket has one frame
    dataset = one(clips, "blue.jpg", buckets=[[9, 32, 64], [1, 64, 32]])
    assert dataset.bucket_of(0) == 1 and dataset[0]["video"].shape == (3, 1, 64, 32)


@pytest.mark.parametrize(
    ("name", "reason", "message"),
    [
        ("short.mp4", "clip too short", r"short\.mp4 gives 6 frames, and 9 are needed"),
        ("broken.mp4", "video can't be decoded", r"begins with b'<html>"),
        ("missing.mp4", "video not found", r"missing\.mp4.*looked for"),
    ],
)
def test_faults_are_fillers_or_raised(clips: Path, name: str, reason: str, message: str) -> None:
    rows = [{"path": "long.mp4", "cap": "a"}, {"path": name, "cap": "b"}]
    path = write_rows(clips / f"faulty.{name}.json", rows)
    dataset = opened(path, basic_data_folder=str(clips))
    sample = dataset[1]
    assert sample["fault"] == reason and sample["row_id"] == -1
    assert f"{path.name}, row 2" in sample["note"]
    assert sample["video"].shape == (3, 9, 32, 64) and not sample["video"].any()
    assert dataset.measure(1)[0].fault == reason
    batch = dataset.collate_fn([dataset[0], sample, dataset[-1]])
    assert batch["sample_weights"].tolist() == [1, 0, 0] and batch["row_ids"].tolist() == [0, -1, -1]
    assert (batch["num_rows"], batch["num_tokens"], batch["rows_left_out"]) == (1, 24, 1)
    if name == "missing.mp4":
        with pytest.raises(BadSample, match=message):
            opened(path, basic_data_folder=str(clips), basic_on_bad_sample="raise")
        return
    strict = opened(path, basic_data_folder=str(clips), basic_on_bad_sample="raise")
    with pytest.raises(BadSample, match=message):
        strict[1]
    with pytest.raises(BadSample, match=message):
        strict.measure(1)


def test_a_file_whose_clips_are_nowhere_ends_the_run(clips: Path) -> None:
    path = write_rows(clips / "nowhere.json", [{"path": "elsewhere/long.mp4", "cap": "a"}])
    with pytest.raises(DataError, match=r"none of the first 1 row\(s\) of .*nowhere\.json can be used; .*elsewhere"):
        opened(path, basic_data_folder=str(clips))


def test_what_a_row_says_is_believed_without_a_look(clips: Path) -> None:
    row = {"num_frames": 99, "fps": 24, "resolution": {"height": 720, "width": 1280}}
    dataset = one(clips, "broken.mp4", row=row, buckets=[[9, 32, 64], [5, 32, 64]])
    assert dataset.measure(0)[0].bucket == 0
    short = one(clips, "short.mp4", row=row, buckets=[[9, 32, 64], [5, 32, 64]])
    assert short.measure(0)[0].bucket == 0
    note = short[0]["note"]
    assert "its row says that the file has 99 frames" in note


def test_short_and_odd_clips_are_left_out_as_asked(clips: Path) -> None:
    rows = [{"path": "short.mp4", "cap": "a"}] * 64
    path = write_rows(clips / "shorts.json", rows)
    kept = {"basic_data_folder": str(clips), "min_num_frames": 5}
    some = opened(path, drop_short_ratio=0.5, **kept)
    faults = [some.measure(index)[0].fault for index in range(64)]
    assert 16 < faults.count("short clip dropped") < 48 and set(faults) == {None, "short clip dropped"}
    place = faults.index("short clip dropped")
    assert some.get(place, 1, 3)["fault"] == "short clip dropped"  # the same rows in every epoch
    assert {opened(path, **kept).measure(index)[0].fault for index in range(64)} == {None}
    off = one(clips, "turned.mp4", hw_aspect_thr=2.0)
    assert off.measure(0)[0].fault == "sides too unequal" and "4.00 times off" in off[0]["note"]
    assert one(clips, "long.mp4", min_hxw=128 * 64 + 1).measure(0)[0].fault == "too small"
    assert one(clips, "long.mp4", min_hxw=128 * 64).measure(0)[0].fault is None


def test_captions(clips: Path) -> None:
    rows = [{"path": "red.png", "cap": ["one", "two", "three"]}] * 40
    path = write_rows(clips / "captions.json", rows)
    dataset = opened(path, "t2i", basic_data_folder=str(clips))
    found = [dataset[index]["caption"] for index in range(40)]
    assert set(found) == {"one", "two", "three"} and found == [dataset[index]["caption"] for index in range(40)]
    some = opened(path, "t2i", rule=RULE.__class__(**{**RULE.__dict__, "text_dropout": None}), cfg=0.25,
                  basic_data_folder=str(clips))  # fmt: skip
    dropped = [some[index]["caption"] == "" for index in range(40)]
    assert 2 < sum(dropped) < 20
    assert all(some[index]["caption"] in ("", found[index]) for index in range(40))
    whole = some.part(some.indices, training=False)
    assert all(whole[index]["caption"] for index in range(40))
    assert some.rule.text_dropout is None and some.text_dropout == 0.25


def test_cleaned_captions() -> None:
    assert captions.clean("  a &amp;amp; b\n\n c ", ("basic_clean", "whitespace_clean")) == "a & b c"
    assert captions.clean(" a  b ", ("whitespace_clean",)) == "a b" and captions.clean(" a  b ", ()) == " a  b "


def test_it_travels_to_workers(clips: Path) -> None:
    dataset = one(clips, "long.mp4", buckets=[[9, 32, 64], [5, 32, 64]])
    other = pickle.loads(pickle.dumps(dataset))
    assert torch.equal(other[0]["video"], dataset[0]["video"])


def test_steps_of_the_pipeline(clips: Path) -> None:
    sized = {"transform_size": "auto", "interpolation_mode": "bilinear", "antialias": True}
    norm = {"trans_type": "norm_fun", "param": {"mean": 0.5, "std": 0.5}}
    steps = [{"trans_type": "ToTensorVideo"}, {"trans_type": "CenterCropResizeVideo", "param": sized}, norm]
    video = one(clips, "long.mp4", train_pipeline={"video": steps}, zero_start=True)[0]["video"]
    plain = one(clips, "long.mp4", zero_start=True)[0]["video"]
    assert video.shape == plain.shape and numbers(video) == list(range(9))
    assert float((video - plain).abs().mean()) < 0.03
    both = {"video_and_first_frame": [{"trans_type": "ToTensorVideo"}], "video_only": steps[1:]}
    assert torch.equal(one(clips, "long.mp4", train_pipeline=both, zero_start=True)[0]["video"], video)
    fixed = {**sized, "transform_size": {"max_height": 48, "max_width": 48}}
    steps[1] = {"trans_type": "CenterCropResizeVideo", "param": fixed}
    assert one(clips, "long.mp4", train_pipeline={"video": steps})[0]["video"].shape == (3, 9, 48, 48)
    with pytest.raises(ConfigError, match=r"video: values from 0 to 1 come out of its steps.*write norm_fun"):
        one(clips, "long.mp4", train_pipeline={"video": steps[:-1]})
    with pytest.raises(ConfigError, match=r"image: values from 0 to 255 come out of its steps.*add ToTensorVideo and"):
        one(clips, "long.mp4", train_pipeline={"image": [steps[1]]})
    with pytest.raises(ConfigError, match=r"train_pipeline\.video: 64×128 pixels come out.*the bucket has 32×64"):
        one(clips, "long.mp4", train_pipeline={"video": [steps[0], norm]})[0]


def test_no_row_of_json_is_read_before_it_is_asked_for(clips: Path) -> None:
    path = clips / "lines.jsonl"
    rows = [json.dumps({"path": "long.mp4", "cap": "a"})] * 20 + ["{broken"]
    path.write_text("\n".join(rows), encoding="utf-8")
    dataset = opened(path, basic_data_folder=str(clips))
    assert len(dataset) == 21 and "lines.jsonl, line 21 (row 21): not valid JSON" in dataset[20]["note"]
