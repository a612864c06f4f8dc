"""Which frames are taken of a clip, and that they are what a decoder reading it from end to end shows."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mindspeed_mm.data.media.containers import open_container, packets_of
from mindspeed_mm.data.media.frames import FrameSource
from mindspeed_mm.data.media.media import DecodedVideo, MediaRef
from mindspeed_mm.data.media.media_files import find_media
from mindspeed_mm.data.media.video import FrameRule, VideoFacts, VideoLength, look_video, plan_frames, read_clip
from mindspeed_mm.utils.errors import BadSample
from tests.support.clips import numbered_frame, read_number, real_clips, write_clip

ROW = "rows.json, row 3"


def _rule(fps: float = 2.0, least: int = 1, most: int = 768, multiple: int = 1) -> FrameRule:
    return FrameRule(fps, least, most, multiple)


def _read(path: Path, rule: FrameRule, timeout: float = 60.0) -> DecodedVideo:
    file = find_media(MediaRef("video", str(path)), [""], ROW)
    facts = look_video(file, rule, timeout)
    plan = plan_frames(facts, rule)
    clip = read_clip(file, facts, plan, (facts.width, facts.height), timeout)
    assert clip.frames.shape == (plan.count, facts.height, facts.width, 3) and len(clip.timestamps) == plan.count
    return clip


def _numbers(path: Path, rule: FrameRule) -> list[int]:
    return [read_number(frame) for frame in _read(path, rule).frames]


def _all_frames(path: Path) -> tuple[list[np.ndarray], list[float]]:
    """The plain way: every frame, one after the other."""
    import av

    with av.open(str(path)) as container:
        frames = list(container.decode(video=0))
        return [frame.to_ndarray(format="rgb24") for frame in frames], [frame.time - frames[0].time for frame in frames]


def _facts(seconds: float, frames: int, counted: bool = True) -> VideoFacts:
    return VideoFacts(8, 8, 0, 0, VideoLength(seconds, frames, counted))


def test_the_plan_of_a_clip() -> None:
    """Times on the grid of fps; at equal distances where a limit decides; every frame where there are no more."""
    plan = plan_frames(_facts(2.0, 50), _rule())
    assert (plan.times, plan.count, plan.fps) == ([0.0, 0.5, 1.0, 1.5], 4, 2.0)
    plan = plan_frames(_facts(2.1, 50), _rule(multiple=2))
    assert (plan.times, plan.wanted, plan.count) == ([0.0, 0.5, 1.0, 1.5, 2.0], 5, 6)
    plan = plan_frames(_facts(10.0, 250), _rule(most=4))
    assert (plan.times, plan.fps) == ([0.0, 2.5, 5.0, 7.5], 0.4)
    plan = plan_frames(_facts(10.0, 250), _rule(most=5, multiple=2))
    assert (plan.wanted, plan.count) == (4, 4), "the most is a multiple too"
    plan = plan_frames(_facts(1.0, 25), _rule(least=4))
    assert (plan.times, plan.fps) == ([0.0, 0.25, 0.5, 0.75], 4.0)
    plan = plan_frames(_facts(1.0, 24), _rule(fps=32.0))
    assert (plan.times, plan.wanted, plan.fps) == (None, 24, 24.0)
    plan = plan_frames(_facts(0.04, 1), _rule(least=4, multiple=2))
    assert (plan.times, plan.wanted, plan.count) == (None, 1, 2)


CONTAINERS = [("clip.mp4", "libx264"), ("clip.mkv", "libx264"), ("clip.webm", "libvpx-vp9"), ("clip.ts", "libx264"),
              ("clip.mov", "libx265"), ("clip.avi", "mjpeg")]  # fmt: skip


@pytest.mark.parametrize(("name", "codec"), CONTAINERS)
def test_containers_and_codecs_give_the_same_frames(tmp_path: Path, name: str, codec: str) -> None:
    options = {"x265-params": "log-level=none"} if codec == "libx265" else {}
    path = write_clip(tmp_path / name, frames=48, codec=codec, options=options)
    assert _numbers(path, _rule(fps=4.0)) == [0, 6, 12, 18, 24, 30, 36, 42]
    assert _numbers(path, _rule(fps=100.0)) == list(range(48)), "every frame, the last one too"


def test_a_variable_frame_rate_is_sampled_by_time(tmp_path: Path) -> None:
    begins = [0.1 * number for number in range(20)] + [4.0, 4.1, 6.0, 6.1]
    for name in ("clip.mp4", "clip.mkv"):
        path = write_clip(tmp_path / name, times=begins)
        clip = _read(path, _rule())
        expected = [int(np.searchsorted(begins, half / 2 + 0.003, side="right")) - 1 for half in range(13)]
        assert [read_number(frame) for frame in clip.frames] == expected, name
        assert list(clip.timestamps) == [half / 2 for half in range(13)], "when they are shown"
    assert _numbers(tmp_path / "clip.mp4", _rule(fps=30.0)) == list(range(24))


def test_a_still_tail_is_not_damage(tmp_path: Path) -> None:
    """Most wanted times lie after the last frame began: it is shown then."""
    begins = [0.02 * number for number in range(50)] + [9.0 + 0.02 * number for number in range(8)]
    for name in ("clip.mp4", "clip.mkv"):
        assert _numbers(write_clip(tmp_path / name, times=begins), _rule(fps=1.0)) == [0] + [49] * 8 + [50]


def test_a_sound_that_goes_on_after_the_pictures_is_not_damage(tmp_path: Path) -> None:
    """The header of this format has one length for both."""
    assert _numbers(write_clip(tmp_path / "clip.flv", sound=4.8), _rule()) == [0, 12] + [23] * 8


@pytest.mark.parametrize("name", ["bigbuckbunny.mp4", "bikes.mp4", "carphone_pristine.mp4"])
def test_filmed_clips_equal_a_plain_reading(name: str) -> None:
    """The frames shown at 0, 0.5, 1, …, pixel by pixel."""
    path = real_clips()[name]
    frames, times = _all_frames(path)
    clip = _read(path, _rule())
    assert clip.source_frames == len(frames) and 2 * len(frames) / clip.source_fps <= len(clip.frames)
    for number, picture in enumerate(clip.frames):
        shown = int(np.searchsorted(times, number / 2 + 0.003, side="right")) - 1
        assert times[shown] - 0.003 <= clip.timestamps[number] == number / 2
        assert np.array_equal(picture, frames[shown]), number


def _count_decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counted = [0]
    following = FrameSource._following

    def count(self: FrameSource) -> Any:
        for frame in following(self):
            counted[0] += 1
            yield frame

    monkeypatch.setattr(FrameSource, "_following", count)
    return counted


@pytest.mark.parametrize(
    ("name", "codec", "options"),
    [
        ("clip.mp4", "libx264", {"bf": "3"}),
        ("clip.mkv", "libx264", {"bf": "3"}),
        ("clip.mp4", "libx265", {"x265-params": "log-level=none:bframes=4:open-gop=1:keyint=24"}),
    ],
)
def test_key_frames_are_used_to_skip_what_nobody_wants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, codec: str, options: dict[str, str]
) -> None:
    path = write_clip(tmp_path / name, frames=240, codec=codec, gop=24, options=options)
    decoded = _count_decoded(monkeypatch)
    assert _numbers(path, _rule(most=4)) == [0, 60, 120, 180]
    assert decoded[0] < 150, "of 181 without skipping"


class _Overshooting:
    """A container whose first seek goes too far."""

    def __init__(self, container: Any) -> None:
        self.container, self.format, self.too_far = container, container.format, 90_000 * 4

    def seek(self, offset: int, stream: Any) -> None:
        self.container.seek(offset + self.too_far, stream=stream)
        self.too_far = 0

    def demux(self, stream: Any) -> Any:
        return self.container.demux(stream)


def test_a_seek_that_goes_too_far_costs_time_only(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "clip.mp4", frames=240, gop=24)
    file = find_media(MediaRef("video", str(path)), [""], ROW)
    with open_container(file, "video", 60.0) as (container, deadline):
        stream = container.streams.video[0]
        source = FrameSource(_Overshooting(container), stream, 0, 1 / 24, deadline)
        shown = [read_number(frame.to_ndarray(format="rgb24")) for _, frame in source.shown_at([0.0, 2.5, 5.0, 7.5])]
    assert shown == [0, 60, 120, 180]


def test_the_display_matrix_is_obeyed(tmp_path: Path) -> None:
    """Frames come out as a player shows them, and their size is foreseen."""
    plain = _read(write_clip(tmp_path / "plain.mp4"), _rule()).frames
    for rotation in (90, 180, -90):
        path = write_clip(tmp_path / f"turned{rotation}.mp4", rotation=rotation)
        assert np.array_equal(_read(path, _rule()).frames, np.rot90(plain, rotation // 90, axes=(1, 2))), rotation


def test_frames_are_scaled_before_they_are_turned(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "clip.mp4", rotation=90)
    file = find_media(MediaRef("video", str(path)), [""], ROW)
    facts = look_video(file, _rule(), 60.0)
    clip = read_clip(file, facts, plan_frames(facts, _rule()), (32, 64), 60.0)
    assert clip.frames.shape == (2, 64, 32, 3)
    assert [read_number(np.rot90(frame, -1)) for frame in clip.frames] == [0, 12]
    expected = np.asarray(Image.fromarray(numbered_frame(12)).resize((64, 32), Image.Resampling.BICUBIC))
    assert np.abs(np.rot90(clip.frames[1], -1).astype(int) - expected).mean() < 6


def test_a_cover_picture_is_not_a_video(tmp_path: Path) -> None:
    import av

    with av.open(str(tmp_path / "song.m4a"), "w", format="mp4") as container:
        stream = container.add_stream("mjpeg", rate=1)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuvj420p"
        stream.disposition = av.stream.Disposition.attached_pic
        frame = av.VideoFrame.from_ndarray(numbered_frame(1, 64, 64), format="rgb24")
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    with pytest.raises(BadSample, match="no video in it") as raised:
        _read(tmp_path / "song.m4a", _rule())
    assert raised.value.reason == "file without video"


def test_a_tail_that_is_gone(tmp_path: Path) -> None:
    """More than half is there: the last good frame stands for the rest. Less: the clip can't be used."""
    path = write_clip(tmp_path / "clip.mp4", frames=96, index_first=True)
    content = path.read_bytes()
    begin, sizes = _sample_data(path)
    for share in (0.8, 0.2):
        cut = tmp_path / f"cut{share}.mp4"
        cut.write_bytes(content[: begin + sum(sizes[: int(share * len(sizes))])])
        if share == 0.2:
            with pytest.raises(BadSample, match="damaged") as raised:
                _read(cut, _rule())
            assert raised.value.reason == "video can't be decoded" and str(cut) in str(raised.value)
            with pytest.raises(BadSample, match="of 96 wanted frames"):
                _read(cut, _rule(fps=100.0))
        else:
            numbers = _numbers(cut, _rule())
            assert numbers[:-1] == [0, 12, 24, 36, 48, 60, 72] and 72 < numbers[-1] < 77


def _sample_data(path: Path) -> tuple[int, list[int]]:
    import av

    with av.open(str(path)) as container:
        entries = list(container.streams.video[0].index_entries)
        return min(entry.pos for entry in entries), [entry.size for entry in entries]


def test_damage_in_the_middle_is_skipped(tmp_path: Path) -> None:
    """Bytes of a picture overwritten: other frames stay right, and nothing is raised."""
    path = write_clip(tmp_path / "clip.mp4", frames=48, gop=8, options={"bf": "0"})
    begin, sizes = _sample_data(path)
    content = bytearray(path.read_bytes())
    middle = begin + sum(sizes[:24])
    content[middle : middle + sizes[24]] = bytes(sizes[24])
    path.write_bytes(bytes(content))
    numbers = _numbers(path, _rule(fps=4.0))
    assert numbers[:4] == [0, 6, 12, 18] and numbers[-2:] == [36, 42] and len(numbers) == 8


def test_time_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_clip(tmp_path / "clip.mp4", frames=48)
    file = find_media(MediaRef("video", str(path)), [""], ROW)
    facts = look_video(file, _rule(), 60.0)

    def slow(*args: Any) -> Any:
        for packet in packets_of(*args):
            time.sleep(0.02)
            yield packet

    monkeypatch.setattr("mindspeed_mm.data.media.containers.packets_of", slow)
    with pytest.raises(BadSample, match=r"longer than 0\.1 s") as raised:
        read_clip(file, facts, plan_frames(facts, _rule()), (128, 64), 0.1)
    assert raised.value.reason == "video takes too long" and str(path) in str(raised.value)


def test_clips_in_a_row_of_parquet(tmp_path: Path) -> None:
    content = write_clip(tmp_path / "clip.mp4").read_bytes()
    file = find_media(MediaRef("video", "x.mp4", content), [""], ROW)
    facts = look_video(file, _rule(), 60.0)
    clip = read_clip(file, facts, plan_frames(facts, _rule(fps=12.0)), (128, 64), 60.0)
    assert [read_number(frame) for frame in clip.frames] == list(range(0, 24, 2))
    with pytest.raises(BadSample, match=r"the bytes of x\.mp4.*begins with b'junk'"):
        look_video(find_media(MediaRef("video", "x.mp4", b"junk"), [""], ROW), _rule(), 60.0)


def test_a_moving_picture_file_without_a_length_is_read_through(tmp_path: Path) -> None:
    """GIF says neither its length nor its frames; each may last differently."""
    pictures = [Image.fromarray(numbered_frame(number)) for number in range(6)]
    pictures[0].save(
        tmp_path / "a.gif", save_all=True, append_images=pictures[1:], duration=[100, 100, 1000, 100, 700, 500]
    )
    begins = list(itertools.accumulate([0, 100, 100, 1000, 100, 700]))
    numbers = _numbers(tmp_path / "a.gif", _rule())
    assert numbers == [int(np.searchsorted(begins, 500 * half + 2, side="right")) - 1 for half in range(5)]
    lasting = [20] * 7 + [2_000]
    pictures = [Image.fromarray(numbered_frame(number)) for number in range(8)]
    pictures[0].save(tmp_path / "b.gif", save_all=True, append_images=pictures[1:], duration=lasting)
    assert _numbers(tmp_path / "b.gif", _rule()) == [0, 7, 7, 7, 7], "a last frame may last long"
