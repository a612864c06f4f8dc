"""Cases of the kinds Images, Video and Audio: media that broke other trainers, as rows would name them."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mindspeed_mm.configs.data_config import PreprocessParameters
from mindspeed_mm.data.adapter import DefaultAdapter
from mindspeed_mm.data.conversation.tokens import Tokenizer
from mindspeed_mm.data.media.media import DecodedVideo, Geometry, MediaRef
from mindspeed_mm.data.media.media_reader import MediaLimits, MediaReader
from mindspeed_mm.models.transformers.adapters import find_adapter
from mindspeed_mm.utils.errors import BadSample
from mindspeed_mm.utils.log import forget_notices
from tests.support.clips import read_number, tone, write_clip, write_sound, write_wav
from tests.support.families import families
from tests.support.tiny import tiny_qwen2_5_vl_dir
from tests.unit.data.generation.generation_maker import opened, write_rows

ROW = "rows.json, row 3"
#: what Qwen2.5-VL's processors accept
QWEN = MediaLimits(image_min_pixels=56 * 56, image_factor=28, video_min_frames=4, temporal_patch=2)


class Row:
    """Media of a row, beside the data file."""

    def __init__(self, folder: Path, limits: MediaLimits = QWEN, **options: Any) -> None:
        self.folder = folder
        self.reader = MediaReader(PreprocessParameters(model_name_or_path="model", **options), limits)

    def look(self, kind: Any, name: str) -> Geometry:
        """What the header of a file says."""
        return self.reader.look(MediaRef(kind, name), [str(self.folder)], ROW)

    def open(self, kind: Any, name: str) -> Any:
        """A file decoded."""
        return self.reader.open(MediaRef(kind, name), [str(self.folder)], ROW)

    def refused(self, kind: Any, name: str) -> str:
        """The reason of a file that can't be used; its message names row and full path."""
        with pytest.raises(BadSample) as raised:
            self.open(kind, name)
        assert ROW in str(raised.value) and str(self.folder / name) in str(raised.value)
        return raised.value.reason


def _qwen_images() -> Any:
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

    return Qwen2VLImageProcessor()


@pytest.mark.parametrize("size", [(1, 1), (29, 27), (332, 27)])
def test_tiny_images_are_enlarged_to_a_legal_size(tmp_path: Path, size: tuple[int, int]) -> None:
    """I01: no side under the patch factor reaches the processor, which takes them all."""
    Image.new("RGB", size, "red").save(tmp_path / "a.png")
    row = Row(tmp_path)
    picture, foreseen = row.open("image", "a.png"), row.look("image", "a.png")
    assert min(picture.size) >= 28 and picture.size == (foreseen.width, foreseen.height)
    assert picture.width * picture.height >= 56 * 56
    assert max(picture.size) <= 60 or picture.size == (345, 28), "the smallest legal size"
    made = _qwen_images()(images=[picture], return_tensors="pt")
    assert int(made["image_grid_thw"].prod()) == len(made["pixel_values"]) >= 16


def test_a_pixel_cap_does_not_make_a_picture_illegal(tmp_path: Path) -> None:
    """I03: 690×15420 under a cap of 12,000 pixels would be 23 pixels wide."""
    Image.new("RGB", (690, 15_420)).save(tmp_path / "tall.png")
    picture = Row(tmp_path, image_max_pixels=12_000).open("image", "tall.png")
    assert picture.size == (28, 625)
    made = _qwen_images()(images=[picture], return_tensors="pt")
    assert made["image_grid_thw"].tolist() == [[1, 44, 2]]
    assert Row(tmp_path, image_max_pixels=100_000).open("image", "tall.png").size == (66, 1_494)


def test_transparency_lies_over_white(tmp_path: Path) -> None:
    """I04: RGBA with black ink, a palette with a transparent colour, LA; three channels, white."""
    palette = Image.new("P", (40, 40), 1)
    palette.putpalette([9, 9, 9, 0, 0, 0])
    for name, picture, options in (
        ("rgba.png", Image.new("RGBA", (40, 40), (0, 0, 0, 0)), {}),
        ("palette.png", palette, {"transparency": 1}),
        ("la.png", Image.new("LA", (40, 40), (0, 0)), {}),
        ("rgba.webp", Image.new("RGBA", (40, 40), (0, 0, 0, 0)), {"lossless": True}),
    ):
        picture.save(tmp_path / name, **options)
        assert np.asarray(Row(tmp_path).open("image", name)).min() == 255, name
        assert np.asarray(Row(tmp_path).open("image", name)).shape[2] == 3


def test_phone_pictures_stand_upright(tmp_path: Path) -> None:
    """I07: a 24×16 JPEG with orientation 6 is 16×24, foreseen and decoded."""
    picture = Image.new("RGB", (24, 16), "white")
    exif = picture.getexif()
    exif[0x0112] = 6
    picture.save(tmp_path / "turned.jpg", exif=exif)
    row = Row(tmp_path, MediaLimits())
    assert row.open("image", "turned.jpg").size == (16, 24)
    assert row.look("image", "turned.jpg") == Geometry("image", height=24, width=16)


def test_broken_images_are_refused_by_row_and_path(tmp_path: Path) -> None:
    """I08: cut at half its bytes, empty, a web page named .jpg; no half-grey picture."""
    buffer = io.BytesIO()
    Image.effect_noise((200, 200), 90).save(buffer, "JPEG")
    cut = buffer.getvalue()[: len(buffer.getvalue()) // 2]
    for name, content in (("cut.jpg", cut), ("0.jpg", b""), ("page.jpg", b"<!DOCTYPE html>")):
        (tmp_path / name).write_bytes(content)
        for decoder in ("pil", "fast"):
            assert Row(tmp_path, image_decoder=decoder).refused("image", name) == "image can't be decoded"


def test_equal_bytes_are_not_equal_pictures(tmp_path: Path) -> None:
    """I10: 120×80 and 80×120 of the same flat pixels, one after the other through the same reader."""
    flat = bytes(range(256)) * (120 * 80 * 3 // 256) + bytes(120 * 80 * 3 % 256)
    row = Row(tmp_path)
    for size in ((120, 80), (80, 120)):
        Image.frombytes("RGB", size, flat).save(tmp_path / f"{size[0]}.png")
    for size in ((120, 80), (80, 120), (120, 80)):
        foreseen, picture = row.look("image", f"{size[0]}.png"), row.open("image", f"{size[0]}.png")
        assert (foreseen.width, foreseen.height) == picture.size == size
        assert picture.tobytes() == flat


def test_missing_media_name_row_and_full_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D13: relative image, video and audio paths don't depend on the working folder."""
    (tmp_path / "elsewhere").mkdir()
    Image.new("RGB", (40, 40)).save(tmp_path / "a.png")
    write_clip(tmp_path / "a.mp4")
    write_wav(tmp_path / "a.wav", tone(440, 0.5, 16_000), 16_000)
    for here in (tmp_path, tmp_path / "elsewhere"):
        monkeypatch.chdir(here)
        for kind, name in (("image", "a.png"), ("video", "a.mp4"), ("audio", "a.wav")):
            assert Row(tmp_path).look(kind, name).kind == kind
            assert Row(tmp_path).refused(kind, "missing") == f"{kind} not found"


def test_broken_clips_are_refused_by_row_and_path(tmp_path: Path) -> None:
    """V01: an mp4 cut before its index, an mp4 of sound only, a good header with hardly a picture behind it."""
    import av

    content = write_clip(tmp_path / "whole.mp4", frames=96).read_bytes()
    (tmp_path / "no_index.mp4").write_bytes(content[: content.rindex(b"moov") - 4])
    with av.open(str(tmp_path / "sound.mp4"), "w") as container:
        track = container.add_stream("aac", rate=16_000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1_024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16_000
        container.mux(track.encode(frame))
        container.mux(track.encode(None))
    content = write_clip(tmp_path / "first.mp4", frames=96, index_first=True).read_bytes()
    with av.open(str(tmp_path / "first.mp4")) as container:
        begin = min(entry.pos for entry in container.streams.video[0].index_entries)
    (tmp_path / "tail.mp4").write_bytes(content[: begin + (len(content) - begin) // 4])
    (tmp_path / "empty.mp4").write_bytes(b"")
    row = Row(tmp_path)
    assert row.refused("video", "no_index.mp4") == "video can't be decoded"
    assert row.refused("video", "sound.mp4") == "file without video"
    assert row.refused("video", "tail.mp4") == "video can't be decoded"
    assert row.refused("video", "empty.mp4") == "video can't be decoded"
    assert [read_number(frame) for frame in row.open("video", "whole.mp4").frames] == list(range(0, 96, 12))


def test_broken_clips_leave_the_process_alive(tmp_path: Path) -> None:
    """V01: bytes of the pictures overwritten at random places, twenty times; the reading process lives on."""
    content = write_clip(tmp_path / "whole.mp4", frames=48, index_first=True).read_bytes()
    random = np.random.default_rng(0)
    for number in range(20):
        damaged = bytearray(content)
        for place in random.integers(200, len(content), 40):
            damaged[place] = int(random.integers(256))
        (tmp_path / f"{number}.mp4").write_bytes(bytes(damaged))
    script = (
        "import sys; from tests.cases.test_media import Row, BadSample; from pathlib import Path\n"
        "row, read, refused = Row(Path(sys.argv[1]), media_timeout=10.0), 0, 0\n"
        "for number in range(20):\n"
        "    try:\n"
        "        foreseen = row.look('video', f'{number}.mp4')\n"
        "        assert len(row.open('video', f'{number}.mp4').frames) == foreseen.frames; read += 1\n"
        "    except BadSample:\n"
        "        refused += 1\n"
        "print(read + refused)"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and done.stdout.split()[-1] == "20", done.stderr[-2_000:]


def test_a_header_that_promises_a_frame_too_many(tmp_path: Path) -> None:
    """V03: N frames promised, N-1 there: the last good one is repeated. A healthy clip keeps its last frame."""
    path = write_clip(tmp_path / "a.mp4", frames=8, index_first=True, options={"bf": "0"})
    import av

    with av.open(str(path)) as container:
        last = max(container.streams.video[0].index_entries, key=lambda entry: entry.pos)
        end = last.pos
    (tmp_path / "short.mp4").write_bytes(path.read_bytes()[:end])
    row = Row(tmp_path, MediaLimits(), video_fps=24.0)
    assert row.look("video", "a.mp4").frames == row.look("video", "short.mp4").frames == 8
    assert [read_number(frame) for frame in row.open("video", "a.mp4").frames] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert [read_number(frame) for frame in row.open("video", "short.mp4").frames] == [0, 1, 2, 3, 4, 5, 6, 6]


@pytest.mark.parametrize(
    ("frames", "fps", "expected"),
    [(1, 2.0, [0, 0]), (24, 2.0, [0, 6, 12, 18]), (3, 2.0, [0, 1, 2, 2]), (24, 32.0, list(range(24)))],
    ids=["V04 one frame", "V04 one second", "V04 below the minimum", "V04 32 of 24 frames"],
)
def test_short_clips(tmp_path: Path, frames: int, fps: float, expected: list[int]) -> None:
    """V04: what exists is taken, the last frame is repeated to a pair, and the count is what was foreseen."""
    write_clip(tmp_path / "a.mp4", frames=frames)
    row = Row(tmp_path, video_fps=fps)
    clip = row.open("video", "a.mp4")
    assert [read_number(frame) for frame in clip.frames] == expected
    assert row.look("video", "a.mp4").frames == len(expected) == len(clip.timestamps)


@pytest.mark.parametrize("rotation", [90, 180, -90])
def test_phone_clips_stand_upright(tmp_path: Path, rotation: int) -> None:
    """V06: the display matrix is obeyed, in what is foreseen and in the frames."""
    plain = Row(write_clip(tmp_path / "plain.mp4").parent).open("video", "plain.mp4").frames
    write_clip(tmp_path / "turned.mp4", rotation=rotation)
    row = Row(tmp_path)
    clip, foreseen = row.open("video", "turned.mp4"), row.look("video", "turned.mp4")
    assert np.array_equal(clip.frames, np.rot90(plain, rotation // 90, axes=(1, 2)))
    assert (foreseen.height, foreseen.width) == clip.frames.shape[1:3]


def test_clips_given_as_pictures(tmp_path: Path) -> None:
    """V08: three pictures are one clip: 2 frames a second, data.json's video_fps, or what the row says."""
    for number in (1, 2, 3):
        Image.new("RGB", (40, 30), (80 * number, 0, 0)).save(tmp_path / f"f{number}.png")
    frames = tuple(MediaRef("image", f"f{number}.png") for number in (1, 2, 3))
    for options, fps, expected in (({}, None, 2.0), ({"video_fps": 5.0}, None, 5.0), ({"video_fps": 5.0}, 8.0, 8.0)):
        reader, ref = Row(tmp_path, **options).reader, MediaRef("video", frames=frames, fps=fps)
        clip, foreseen = reader.open(ref, [str(tmp_path)], ROW), reader.look(ref, [str(tmp_path)], ROW)
        assert isinstance(clip, DecodedVideo) and clip.fps == foreseen.fps == expected
        assert clip.frames[:, 0, 0, 0].tolist() == [80, 160, 240, 240] and foreseen.frames == 4
    with pytest.raises(BadSample, match=r"f9\.png"):
        Row(tmp_path).reader.look(
            MediaRef("video", frames=(*frames, MediaRef("image", "f9.png"))), [str(tmp_path)], ROW
        )


def test_long_sounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A01: 31 s are heard whole; a model that hears 30 s gets these, and it is said."""
    write_wav(tmp_path / "long.wav", tone(440, 31.0, 16_000), 16_000)
    said: list[str] = []
    monkeypatch.setattr("mindspeed_mm.utils.log.logger.warning", said.append)
    forget_notices()
    for limit, samples in ((None, 31 * 16_000), (30.0, 30 * 16_000)):
        assert not said
        row = Row(tmp_path, MediaLimits(max_audio_seconds=limit))
        assert row.look("audio", "long.wav").samples == len(row.open("audio", "long.wav")) == samples
    assert len(said) == 1 and "31.0 s" in said[0] and "30 s" in said[0]


def test_short_silent_and_empty_sounds(tmp_path: Path) -> None:
    """A03: 368 samples are padded to a window, silence is a sound, a header without samples is refused."""
    write_wav(tmp_path / "short.wav", np.full(368, 0.5), 16_000)
    write_wav(tmp_path / "silent.wav", np.zeros(8_000), 16_000)
    write_wav(tmp_path / "header.wav", np.zeros(0), 16_000)
    row = Row(tmp_path, MediaLimits(min_audio_samples=400))
    short = row.open("audio", "short.wav")
    assert row.look("audio", "short.wav").samples == len(short) == 400
    assert short[:368].min() > 0.49 and not short[368:].any()
    silent = row.open("audio", "silent.wav")
    assert len(silent) == 8_000 and not silent.any()
    assert row.refused("audio", "header.wav") == "sound is empty"


LONG_LAST = [("mp4", "0"), ("mp4", "2"), ("mkv", "2"), ("webm", None)]


@pytest.mark.parametrize(("suffix", "reordered"), LONG_LAST)
def test_a_last_frame_that_is_shown_for_long(tmp_path: Path, suffix: str, reordered: str | None) -> None:
    """W02: 60 frames in 2 s, the last one shown for 20 s: frames by time, the last one repeated; no damage is said."""
    options = {} if reordered is None else {"bf": reordered}
    codec = "libx264" if reordered else "libvpx"
    write_clip(tmp_path / f"a.{suffix}", frames=60, rate=30, last=20.0, options=options, codec=codec)
    row = Row(tmp_path)
    clip, foreseen = row.open("video", f"a.{suffix}"), row.look("video", f"a.{suffix}")
    expected = [0, 15, 30, 45, *[59] * 40]
    assert foreseen.frames == len(clip.frames) == 44
    assert [read_number(frame) for frame in clip.frames] == expected
    assert list(clip.timestamps) == list(foreseen.times) == [half / 2 for half in range(len(expected))]
    every = Row(tmp_path, video_fps=32.0).look("video", f"a.{suffix}")
    assert every.fps == pytest.approx(30.0, rel=1e-2), "of the frames taken"


def test_a_damaged_tail_is_not_a_long_last_frame(tmp_path: Path) -> None:
    """W02: the same file cut after a quarter of its frames is refused, and after three quarters its end is repeated."""
    content = write_clip(
        tmp_path / "a.mp4", frames=60, rate=30, last=4.0, options={"bf": "0"}, index_first=True
    ).read_bytes()
    import av

    with av.open(str(tmp_path / "a.mp4")) as container:
        places = sorted(entry.pos for entry in container.streams.video[0].index_entries)
    (tmp_path / "cut.mp4").write_bytes(content[: places[15]])
    assert Row(tmp_path).refused("video", "cut.mp4") == "video can't be decoded"


@pytest.mark.parametrize(("suffix", "reordered"), LONG_LAST)
def test_a_clip_to_make_whose_last_frame_is_long(tmp_path: Path, suffix: str, reordered: str | None) -> None:
    """W02: a generation model gets the frames by time, at the clip's own rate or its train_fps."""
    options = {} if reordered is None else {"bf": reordered}
    codec = "libx264" if reordered else "libvpx"
    write_clip(tmp_path / f"a.{suffix}", frames=60, rate=30, last=20.0, options=options, codec=codec)
    data = write_rows(tmp_path / "rows.json", [{"path": f"a.{suffix}", "cap": "a"}])
    keys: dict[str, Any] = {"basic_data_folder": str(tmp_path), "basic_on_bad_sample": "raise", "zero_start": True}
    for fps, frames, expected in ((None, 33, list(range(33))), (10, 33, [*range(0, 60, 3), *[59] * 13])):
        video = opened(data, train_fps=fps, num_frames=frames, **keys)[0]["video"]
        pixels = ((video.permute(1, 2, 3, 0) + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).numpy()
        assert [read_number(picture) for picture in pixels] == expected


def test_a_cut_of_uneven_frames(tmp_path: Path) -> None:
    """W02: frames a to b - 1 of a file are those, however long each is shown."""
    times = [0, 0.1, 0.2, 5.0, *(5.0 + number / 10 for number in range(1, 12))]
    write_clip(tmp_path / "a.mkv", times=times)
    row = {"path": "a.mkv", "cap": "a", "cut": [3, 12]}
    data = write_rows(tmp_path / "rows.json", [row])
    keys: dict[str, Any] = {"basic_data_folder": str(tmp_path), "basic_on_bad_sample": "raise", "train_fps": 10}
    video = opened(data, num_frames=1, buckets=[[1, 32, 64]], zero_start=True, **keys)[0]["video"]
    pixels = ((video.permute(1, 2, 3, 0) + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).numpy()
    assert [read_number(picture) for picture in pixels] == [3]


UNEVEN = [0.0, 0.1, 0.2, 5.0]


@pytest.mark.parametrize(
    ("family", "suffix"), [("qwen3_vl", "mp4"), ("qwen3_vl", "mkv"), ("glm4v", "mp4"), ("qwen2_5_vl", "mp4")]
)
def test_the_model_is_told_the_files_own_timestamps(tmp_path: Path, family: str, suffix: str) -> None:
    """W12: frames at 0, 0.1, 0.2 and 5.0 s, all taken: 0.1 and 2.6 s are written and foreseen."""
    from transformers import AutoProcessor

    write_clip(tmp_path / f"a.{suffix}", times=UNEVEN)
    make = families()[family].make if family in families() else tiny_qwen2_5_vl_dir
    hf_dir = make(tmp_path / "hf")
    adapter = find_adapter(SimpleNamespace(init_from_hf_path=str(hf_dir)))
    processor = AutoProcessor.from_pretrained(hf_dir)
    # Matroska's header has no number of frames: they are counted where about as many are wanted
    row = Row(tmp_path, adapter.limits(processor), video_fps=2.0 if suffix == "mp4" else 30.0)
    tokenizer = Tokenizer(processor, adapter, {})
    geometry, clip = row.look("video", f"a.{suffix}"), row.open("video", f"a.{suffix}")
    assert [read_number(frame) for frame in clip.frames] == [0, 1, 2, 3]
    assert list(clip.timestamps) == list(geometry.times) == pytest.approx(UNEVEN)
    tensors, (text,) = tokenizer.process([("video", clip)])
    foreseen = tokenizer.foresee(geometry)
    assert foreseen is not None and foreseen.text == text
    if family == "qwen3_vl":
        assert re.findall(r"<([\d.]+) seconds>", text) == ["0.1", "2.6"]
    elif family == "glm4v":
        assert re.findall(r"\d+(?:\.\d+)?", text) == ["0", "0"], "whole seconds of the first frame of each two"
    else:
        assert tensors["second_per_grid_ts"].tolist() == pytest.approx([2.55]), "from the middle of two to the next"


def test_times_of_sampled_and_repeated_frames(tmp_path: Path) -> None:
    """W12: frames that are sampled by time are told with it; the one that fills up a pair has no time of its own."""
    from transformers.video_utils import VideoMetadata

    write_clip(tmp_path / "a.mp4", frames=63, rate=30)
    clip = Row(tmp_path).open("video", "a.mp4")
    assert list(clip.timestamps) == [0.0, 0.5, 1.0, 1.5, 2.0, 2.0]
    told = VideoMetadata(**DefaultAdapter().video_metadata(clip))
    assert told.timestamps == [0.0, 0.5, 1.0, 1.5, 2.0, 2.0] and told.sampled_fps == 2.0
    clip = Row(tmp_path, video_fps=30.0, video_maxlen=200).open("video", "a.mp4")
    assert list(clip.timestamps)[:63] == pytest.approx([number / 30 for number in range(63)])
    assert VideoMetadata(**DefaultAdapter().video_metadata(clip)).sampled_fps == pytest.approx(30.0)


HUGE = 14_000


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_huge_scan_has_a_key(tmp_path: Path) -> None:
    """I09: a 1-bit PNG of 14000×14000 is refused by a limit that has a name, and used where that is set."""
    Image.new("1", (HUGE, HUGE)).save(tmp_path / "scan.png")
    row = Row(tmp_path)
    with pytest.raises(BadSample, match=r"14000×14000 = 196,000,000 pixels, and at most 178,956,970.*media_max_pixels"):
        row.look("image", "scan.png")
    assert row.refused("image", "scan.png") == "image too large"
    before = Image.MAX_IMAGE_PIXELS
    assert Row(tmp_path, media_max_pixels=HUGE**2).look("image", "scan.png").width == HUGE
    data = write_rows(tmp_path / "rows.json", [{"path": "scan.png", "cap": "a"}])
    keys: dict[str, Any] = {"basic_data_folder": str(tmp_path), "basic_on_bad_sample": "raise"}
    with pytest.raises(BadSample, match=r"preprocess_parameters\.media_max_pixels in data\.json to 196000000"):
        opened(data, "t2i", **keys)[0]
    assert opened(data, "t2i", media_max_pixels=HUGE**2, **keys).measure(0)[0].fault is None
    assert before == Image.MAX_IMAGE_PIXELS, "PIL's own limit is as it was"


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_the_limit_on_pixels_is_one_for_all_media(tmp_path: Path) -> None:
    """I09: images, frames of videos, pictures of a clip; one pixel more than fits is too many."""
    Image.effect_noise((100, 80), 90).convert("1").save(tmp_path / "a.png")
    write_clip(tmp_path / "a.mp4", frames=4)  # 128×64
    for most, fits in ((8_192, True), (7_999, False)):
        row, clip = Row(tmp_path, media_max_pixels=most), MediaRef("video", frames=(MediaRef("image", "a.png"),) * 2)
        for kind, name in (("image", "a.png"), ("video", "a.mp4")):
            if fits:
                row.open(kind, name)
            else:
                assert row.refused(kind, name) == f"{kind} too large"
        if fits:
            row.reader.open(clip, [str(tmp_path)], ROW)
        else:
            with pytest.raises(BadSample, match="media_max_pixels"):
                row.reader.look(clip, [str(tmp_path)], ROW)
    scaled = Row(tmp_path, MediaLimits(), image_max_pixels=2_000).open("image", "a.png")
    with Image.open(tmp_path / "a.png") as plain:
        assert np.array_equal(np.asarray(scaled), np.asarray(plain.convert("RGB").resize(scaled.size)))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("rate", [16_000, 22_050])
def test_sounds_that_are_no_numbers(tmp_path: Path, value: float, rate: int) -> None:
    """L07: one sample of a float WAV is NaN or infinite: the file is refused, resampled or not."""
    samples = tone(440, 0.5, rate)[None].copy()
    write_sound(tmp_path / "good.wav", samples, rate, "pcm_f32le")
    samples[0, rate // 4] = value
    write_sound(tmp_path / "bad.wav", samples, rate, "pcm_f32le")
    row = Row(tmp_path)
    assert np.abs(row.open("audio", "good.wav")).max() <= 1
    assert row.refused("audio", "bad.wav") == "sound isn't finite"
    with pytest.raises(BadSample, match=r"1 of \d+ are NaN or infinite, the first at 0\.250 s"):
        row.open("audio", "bad.wav")


def test_sounds_beyond_full_scale(tmp_path: Path) -> None:
    """L07: a little beyond ±1 is clipped as a player does it; 16-bit numbers stored as floats are refused."""
    write_sound(tmp_path / "loud.wav", 3 * tone(440, 0.5, 16_000)[None], 16_000, "pcm_f32le")
    write_sound(tmp_path / "shorts.wav", 32_768 * tone(440, 0.5, 16_000)[None], 16_000, "pcm_f32le")
    row = Row(tmp_path)
    loud = row.open("audio", "loud.wav")
    assert loud.max() == 1 and loud.min() == -1 and np.count_nonzero(np.abs(loud) < 1) > 1_000
    assert row.refused("audio", "shorts.wav") == "sound out of range"


def test_pixels_that_are_no_numbers(tmp_path: Path) -> None:
    """L07: a TIFF of floats with a NaN or an infinite pixel."""
    for value, name in ((np.nan, "nan.tiff"), (np.inf, "inf.tiff")):
        pixels = np.full((40, 40), 0.5, np.float32)
        pixels[3, 4] = value
        Image.fromarray(pixels).save(tmp_path / name)
        assert Row(tmp_path).refused("image", name) == "image can't be decoded"
        with pytest.raises(BadSample, match="pixels that are no numbers"):
            Row(tmp_path).open("image", name)
