"""The reader of all media: what it foresees is what it opens, whatever the medium."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mindspeed_mm.configs.data_config import PreprocessParameters
from mindspeed_mm.data.media.media import DecodedVideo, Geometry, MediaRef
from mindspeed_mm.data.media.media_reader import MediaLimits, MediaReader
from mindspeed_mm.utils.errors import BadSample
from tests.support.clips import numbered_frame, read_number, tone, write_clip, write_sound, write_wav

ROW = "rows.json, row 3"
QWEN = MediaLimits(image_min_pixels=3_136, image_factor=28, temporal_patch=2, video_min_frames=4)


def _reader(limits: MediaLimits = QWEN, **options: Any) -> MediaReader:
    return MediaReader(PreprocessParameters(model_name_or_path="model", **options), limits)


def _geometry(opened: Image.Image | DecodedVideo | np.ndarray) -> Geometry:
    if isinstance(opened, DecodedVideo):
        assert opened.frames.dtype == np.uint8 and len(opened.timestamps) == len(opened.frames)
        assert list(opened.timestamps) == sorted(opened.timestamps)
        return Geometry("video", *opened.frames.shape[1:3], opened.frames.shape[0], opened.fps, times=opened.timestamps)
    if isinstance(opened, np.ndarray):
        return Geometry("audio", samples=len(opened))
    assert opened.mode == "RGB"
    return Geometry("image", opened.height, opened.width)


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a medium of every kind."""
    folder = tmp_path_factory.mktemp("media")
    for number, size in enumerate(((1, 1), (29, 27), (332, 27), (640, 480), (90, 1_300))):
        Image.new("RGB", size, "red").save(folder / f"{number}.png")
    Image.effect_noise((1_200, 900), 60).save(folder / "large.jpg")
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.new("RGB", (400, 200)).save(folder / "turned.jpg", exif=turned)
    write_clip(folder / "a.mp4", frames=60, sound=2.5)
    write_clip(folder / "turned.mp4", rotation=90)
    write_clip(folder / "one.mp4", frames=1)
    write_clip(folder / "uneven.mkv", times=[0, 0.1, 0.5, 2.0, 2.1, 3.0])
    write_wav(folder / "a.wav", tone(440, 1.7, 22_050), 22_050)
    write_sound(folder / "a.mp3", tone(440, 1.7, 44_100)[None], 44_100, "libmp3lame")
    return folder


def _refs(folder: Path) -> list[MediaRef]:
    kinds = {".mp4": "video", ".mkv": "video", ".wav": "audio", ".mp3": "audio"}
    refs = [MediaRef(kinds.get(path.suffix, "image"), path.name) for path in sorted(folder.iterdir())]
    refs += [MediaRef(ref.kind, ref.path, (folder / ref.path).read_bytes()) for ref in refs]
    refs.append(MediaRef("audio", "a.mp4"))
    pictures = tuple(MediaRef("image", name) for name in ("3.png", "turned.jpg", "large.jpg"))
    return [*refs, MediaRef("video", frames=pictures), MediaRef("video", frames=pictures * 3, fps=8.0)]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"image_max_pixels": 10_000, "video_max_pixels": 3_000, "video_maxlen": 5, "video_fps": 10.0},
    {"image_decoder": "fast", "image_max_pixels": 90_000, "audio_sampling_rate": 24_000, "video_fps": 1.0},
    {"image_min_pixels": 500_000, "video_min_pixels": 20_000, "video_fps": 30.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "small", "fast", "large"])
def test_looking_foresees_what_opening_gives(media: Path, options: dict[str, Any]) -> None:
    limits = MediaLimits(**{**vars(QWEN), "max_audio_seconds": 1.0} if "video_maxlen" in options else vars(QWEN))
    for ref in _refs(media):
        reader = _reader(limits, **options)
        foreseen = reader.look(ref, [str(media)], ROW)
        assert _geometry(reader.open(ref, [str(media)], ROW)) == foreseen, ref.path
        assert _geometry(_reader(limits, **options).open(ref, [str(media)], ROW)) == foreseen, "without looking first"
        if foreseen.kind == "video":
            assert foreseen.frames % 2 == 0 and min(foreseen.height, foreseen.width) >= 28


def test_limits_of_data_json_come_on_top_of_the_models(media: Path) -> None:
    look = {name: _reader(**options).look(MediaRef("video", "a.mp4"), [str(media)], ROW) for name, options in {
        "model": {}, "fps": {"video_fps": 4.0}, "most": {"video_maxlen": 2}, "area": {"video_max_pixels": 2_048},
    }.items()}  # fmt: skip
    assert (look["model"].frames, look["model"].fps) == (6, 2.0), "5 frames of 2.5 s and a repeat"
    assert (look["fps"].frames, look["fps"].fps) == (10, 4.0)
    assert (look["most"].frames, look["most"].fps) == (2, 0.8)
    assert (look["area"].width, look["area"].height) == (64, 32)
    assert _reader(audio_sampling_rate=8_000).look(MediaRef("audio", "a.wav"), [str(media)], ROW).samples == 13_600


def test_a_clip_of_pictures(tmp_path: Path) -> None:
    """As many frames as pictures, of the first one's size; evenly thinned beyond the most."""
    for number in range(8):
        size = (128, 64) if number % 2 == 0 else (256, 128)
        Image.fromarray(numbered_frame(number, *size)).save(tmp_path / f"{number}.png")
    refs = tuple(MediaRef("image", f"{number}.png") for number in range(8))
    clip = _reader().open(MediaRef("video", frames=refs[:3]), [str(tmp_path)], ROW)
    assert (
        isinstance(clip, DecodedVideo) and clip.frames.shape == (4, 64, 128, 3) and clip.fps == clip.source_fps == 2.0
    )
    assert [read_number(frame) for frame in clip.frames] == [0, 1, 2, 2]
    assert list(clip.timestamps) == [0.0, 0.5, 1.0, 1.0]
    clip = _reader(video_fps=5.0).open(MediaRef("video", frames=refs[:3]), [str(tmp_path)], ROW)
    assert isinstance(clip, DecodedVideo) and clip.fps == 5.0, "data.json's"
    clip = _reader(video_fps=5.0, video_maxlen=4).open(MediaRef("video", frames=refs, fps=8.0), [str(tmp_path)], ROW)
    assert isinstance(clip, DecodedVideo) and (clip.fps, clip.source_fps, clip.source_frames) == (4.0, 8.0, 8), (
        "the row's own"
    )
    assert [read_number(frame) for frame in clip.frames] == [0, 2, 4, 6]
    assert list(clip.timestamps) == [0.0, 0.25, 0.5, 0.75]


def test_ratios(tmp_path: Path) -> None:
    Image.new("RGB", (201, 1)).save(tmp_path / "line.png")
    Image.new("RGB", (100, 10)).save(tmp_path / "strip.png")
    write_clip(tmp_path / "strip.mp4", size=(320, 32))
    with pytest.raises(BadSample, match=r"201×1 pixels.*200 times") as raised:
        _reader().look(MediaRef("image", "line.png"), [str(tmp_path)], ROW)
    assert raised.value.reason == "image too narrow"
    reader = _reader(max_aspect_ratio=9.5)
    for kind, name in (("image", "strip.png"), ("video", "strip.mp4")):
        assert _reader().look(MediaRef(kind, name), [str(tmp_path)], ROW).width > 0
        with pytest.raises(BadSample, match=r"9\.5 times") as raised:
            reader.open(MediaRef(kind, name), [str(tmp_path)], ROW)
        assert raised.value.reason == f"{kind} too narrow"


def test_headers_are_read_once_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mindspeed_mm.data.media import media_reader

    looked, image_size = [], media_reader.image_size
    monkeypatch.setattr(
        media_reader, "image_size", lambda file, *limit: looked.append(file.path) or image_size(file, *limit)
    )
    monkeypatch.setattr(media_reader, "_REMEMBERED", 1)
    path, reader = tmp_path / "a.png", _reader()
    Image.new("RGB", (100, 80)).save(path)
    for _ in range(3):
        assert reader.look(MediaRef("image", "a.png"), [str(tmp_path)], ROW).width == 100
    assert looked == [str(path)]
    Image.new("RGB", (60, 80)).save(path)
    os.utime(path, ns=(1, 1))
    assert reader.look(MediaRef("image", "a.png"), [str(tmp_path)], ROW).width == 60
    Image.new("RGB", (50, 50)).save(tmp_path / "b.png")
    for name in ("b.png", "a.png", "b.png"):
        reader.look(MediaRef("image", name), [str(tmp_path)], ROW)
    assert len(looked) == 5, "the least recently used one is forgotten"
    assert pickle.loads(pickle.dumps(reader)).look(MediaRef("image", "a.png"), [str(tmp_path)], ROW).width == 60


def test_the_sound_of_a_video_agrees_too(media: Path) -> None:
    """A video named in the column of sounds is heard; the same file in that of videos is seen."""
    reader, ref = _reader(), MediaRef("audio", "a.mp4")
    sound = reader.open(ref, [str(media)], ROW)
    assert reader.look(ref, [str(media)], ROW) == Geometry("audio", samples=len(sound))
    assert reader.look(MediaRef("video", "a.mp4"), [str(media)], ROW).kind == "video", "remembered apart"
    with pytest.raises(BadSample, match="no sound"):
        reader.look(MediaRef("audio", "one.mp4"), [str(media)], ROW)


def test_media_are_found_in_the_first_folder_that_holds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first / "sub", second, first / "folder.png"):
        folder.mkdir(parents=True)
    for path in (first / "sub" / "a.png", second / "b.png", second / "folder.png"):
        path.write_bytes(b"x")
    (second / "sub").mkdir()
    (second / "sub" / "a.png").write_bytes(b"x")
    folders, reader = [str(first), str(second)], _reader()
    for here in (tmp_path, first):
        monkeypatch.chdir(here)
        for name, path in (
            ("sub/a.png", first / "sub" / "a.png"),
            ("b.png", second / "b.png"),
            ("folder.png", second / "folder.png"),
            (str(second / "b.png"), second / "b.png"),
        ):
            assert reader.locate(MediaRef("image", name), folders, ROW) == str(path)
    os.mkfifo(first / "pipe.png")
    for name in ("pipe.png", "none.png", "zero\0.png", ""):
        with pytest.raises(BadSample):
            reader.locate(MediaRef("image", name), folders, ROW)
