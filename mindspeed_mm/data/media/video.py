"""Videos: choose the frames of a file, and decode them as upright RGB.

**Choice of frames.** Times are seconds from the beginning of the first frame, by the file's own timestamps, so that a
variable frame rate is respected. A clip lasts D seconds and has N frames.

1. Wanted are the times 0, 1/fps, 2/fps, … below D.
2. If these are fewer than the least number of frames or more than the most, that number n is taken instead, at 0, D/n,
   2D/n, …; the most is a multiple of the temporal patch.
3. No more frames are taken than exist: if N or more are wanted, every frame is taken once, the last one too.
4. What is shown at a time is the last frame that began before it or up to 3 ms after (containers round timestamps).
5. The last frame is repeated until their number is a multiple of the temporal patch.
6. The timestamps for the model are the times at which its frames are shown: those of rule 1 or 2, or, where
   every frame is taken, those at which they begin.
7. Where decoding ends early (a damaged tail, a header that promises a frame too many), the last good frame replaces
   the missing ones; if these are more than half of the wanted ones, the clip can't be used.

**Pixels.** Frames are turned by the display matrix, in steps of 90 degrees; mirroring in that matrix, and pixels that
aren't square, are ignored. Scaled (bicubic) by the limits of data.json.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mindspeed_mm.configs.data_config import MEDIA_MAX_PIXELS
from mindspeed_mm.data.media.containers import (
    Deadline,
    decode,
    header_seconds,
    open_container,
    packets_of,
    use_one_thread,
)
from mindspeed_mm.data.media.frames import REORDERED, FrameSource
from mindspeed_mm.data.media.media import DecodedVideo
from mindspeed_mm.data.media.media_files import MediaFile
from mindspeed_mm.utils.log import notice

if TYPE_CHECKING:
    from av import VideoFrame
    from av.container import InputContainer
    from av.video.stream import VideoStream

_COVER = 0x400  # FFmpeg's disposition of an attached picture
_TOLERANCE = 1.5  # frames that a header may be off


@dataclass(frozen=True)
class FrameRule:
    """The rule for the number of frames of a clip.

    Attributes:
        fps: frames a second.
        min_frames, max_frames: least and most frames.
        multiple: their number is rounded to a multiple of this.
    """

    fps: float
    min_frames: int
    max_frames: int
    multiple: int

    @property
    def most(self) -> int:
        """`max_frames` as a multiple of `multiple`, at least one."""
        return max(self.multiple, self.max_frames // self.multiple * self.multiple)

    def padded(self, count: int) -> int:
        """Number of frames after the last of `count` is repeated up to a multiple."""
        return -(-count // self.multiple) * self.multiple


@dataclass(frozen=True)
class VideoLength:
    """Duration and number of frames of a video.

    Attributes:
        seconds: from the beginning of the first frame to the end of the last one.
        frames: its frames; an estimate if not `counted`.
        counted: whether `frames` is known and not estimated, and their times with it.
        last: beginning of its last frame, if its timestamps have been read; else frames are assumed to be even.
        begins: beginning of each frame, [frames] float64, if its timestamps have been read and are needed.
    """

    seconds: float
    frames: int
    counted: bool
    last: float | None = None
    begins: np.ndarray | None = field(default=None, compare=False, repr=False)

    @property
    def spacing(self) -> float:
        """Seconds from one frame to the next, on average; how long the last one is shown doesn't count."""
        if not self.last:
            return self.seconds / self.frames
        return self.last / (self.frames - 1)

    def begin(self, number: int) -> float:
        """Return the second at which a frame begins; after the last frame, the end."""
        if number >= self.frames:
            return self.seconds
        return number * self.spacing if self.begins is None else float(self.begins[number])


@dataclass(frozen=True)
class VideoFacts:
    """Facts about a video, known before its frames are decoded.

    Attributes:
        width, height: pixels of a frame, upright.
        turns: quarter turns, counterclockwise, from the stored frame to the upright one.
        first: timestamp of the first frame, in units of the stream.
        length: duration and frames.
    """

    width: int
    height: int
    turns: int
    first: int
    length: VideoLength


@dataclass(frozen=True)
class FramePlan:
    """The frames wanted of a clip.

    Attributes:
        times: seconds at which they are shown; None: every frame, `wanted` in all.
        wanted: number of frames before the last one is repeated.
        count: number of frames with these repeats.
        fps: wanted frames a second.
        timestamps: the second of each of the `count` frames, for the model.
    """

    times: Sequence[float] | None
    wanted: int
    count: int
    fps: float
    timestamps: tuple[float, ...] = ()


def plan_frames(facts: VideoFacts, rule: FrameRule) -> FramePlan:
    """Choose the frames of a video (rules 1, 2, 3, 5 and 6 of this file)."""
    length, (wanted, is_natural) = facts.length, _wanted(facts.length, rule)
    every = wanted >= length.frames
    if every:
        wanted = length.frames
        times = [length.begin(number) for number in range(wanted)]
        fps = length.frames / length.seconds if length.begins is None else _rate_of(times, length, rule.multiple)
    else:
        fps = rule.fps if is_natural else wanted / length.seconds
        times = [number / fps for number in range(wanted)]
    count = rule.padded(wanted)
    timestamps = (*times, *times[-1:] * (count - wanted))
    return FramePlan(None if every else times, wanted, count, fps, timestamps)


def _wanted(length: VideoLength, rule: FrameRule) -> tuple[int, bool]:
    """The number of frames by rules 1 and 2, and whether it is that of rule 1."""
    natural = max(1, math.ceil(length.seconds * rule.fps - 1e-6))
    wanted = min(max(natural, rule.min_frames), rule.most)
    return wanted, wanted == natural


def _rate_of(times: Sequence[float], length: VideoLength, multiple: int) -> float:
    """Frames a second of uneven frames, from the distances of the middles of their temporal patches."""
    patches = np.reshape(times[: len(times) // multiple * multiple], (-1, multiple)).mean(axis=1)
    if len(patches) > 1 and patches[-1] > patches[0]:
        return float(multiple * (len(patches) - 1) / (patches[-1] - patches[0]))
    return 1 / length.spacing


def look_video(file: MediaFile, rule: FrameRule, timeout: float, most: int = MEDIA_MAX_PIXELS) -> VideoFacts:
    """Read a video's header, and decode its first frame, which alone has the orientation.

    Files whose header doesn't give the length, or whose frames aren't evenly spaced, are read through without decoding;
    so are those whose last frame comes late or is shown for long.

    Args:
        file: The video.
        rule: How many frames will be taken.
        timeout: Time limit in seconds.
        most: Largest number of pixels of a frame.

    Raises:
        BadSample: The file isn't a video, its frames have more pixels than `most`, or not even its first frame can be
            decoded.
    """
    with open_container(file, "video", timeout) as (container, deadline):
        stream = _video_stream(container, file)
        file.check_pixels("video", stream.codec_context.width or 0, stream.codec_context.height or 0, most)
        frame = next(decode(container, stream, deadline), None)
        if frame is None:
            raise file.fault("has no frame that can be decoded", "video can't be decoded")
        turns = round(frame.rotation / 90) % 4
        width, height = (frame.height, frame.width) if turns % 2 else (frame.width, frame.height)
        length = _header_length(container, stream, frame, deadline)
        facts = VideoFacts(width, height, turns, frame.pts or 0, length)
    if not length.counted and _wanted(length, rule)[0] >= length.frames - 1:
        length = count_frames(file, timeout)
        if _wanted(length, rule)[0] < length.frames:  # facts are cached: keep them small
            length = replace(length, begins=None)
        facts = replace(facts, length=length)
    return facts


def count_frames(file: MediaFile, timeout: float) -> VideoLength:
    """Determine a video's length, and the times of its frames, by reading it through without decoding."""
    with open_container(file, "video", timeout) as (container, deadline):
        stream = _video_stream(container, file)
        packets = [
            (packet.pts, packet.duration or 0)
            for packet in packets_of(container, stream, deadline)
            if not packet.is_discard
        ]
        unit, rate, stated = float(stream.time_base), _rate(stream), float(header_seconds(stream) or 0)
        promised = stream.frames if len(_index(stream)) == stream.frames else 0
    count = max(len(packets), 1)
    if count < promised and stated:  # the end is missing: take the length in the header
        return VideoLength(stated, promised, True)
    if not packets or any(begin is None for begin, _ in packets):  # AVI: packets without time
        return VideoLength(count / rate, count, True)
    packets.sort()
    begins = np.array([begin - packets[0][0] for begin, _ in packets]) * unit
    last = float(begins[-1])
    seconds = last + (packets[-1][1] * unit or 1 / rate)
    if count == promised:  # durations stand in the order of decoding; their sum is right whatever the order
        seconds = max(seconds, stated)
    return VideoLength(seconds, count, True, last, begins)


def read_clip(
    file: MediaFile, facts: VideoFacts, plan: FramePlan, size: tuple[int, int], timeout: float
) -> DecodedVideo:
    """Decode the planned frames.

    Args:
        file: The video.
        facts: The result of `look_video`.
        plan: The result of `plan_frames`.
        size: Width and height of the upright frames.
        timeout: Time limit in seconds.

    Returns:
        A clip of exactly `plan.count` frames, with the timestamps of the plan.

    Raises:
        BadSample: Fewer than half of the wanted frames can be decoded, or it takes too long.
    """
    length, good = facts.length, 0
    images = np.empty((plan.count, size[1], size[0], 3), np.uint8)
    with open_container(file, "video", timeout) as (container, deadline):
        stream = _video_stream(container, file)
        source = FrameSource(container, stream, facts.first, length.spacing, deadline)
        chosen = source.every(plan.wanted) if plan.times is None else source.shown_at(plan.times)
        previous = None
        for read, (_, frame) in enumerate(chosen):
            images[read] = images[read - 1] if frame is previous else _rgb(frame, size, facts.turns)
            previous = frame
            good = read + 1
    there = good
    if plan.times is not None and source.end is not None:
        good = _reached(plan.times, source.end, length)
        if 2 * good < plan.wanted and not length.counted:  # perhaps its last frame is a long one
            good = _reached(plan.times, source.end, count_frames(file, timeout))
    if 2 * good < plan.wanted or not there:
        raise file.fault(
            f"is damaged: {good} of {plan.wanted} wanted frames can be decoded; at least half are needed",
            "video can't be decoded",
        )
    if good < plan.wanted:
        what = f"is damaged: {plan.wanted - good} of {plan.wanted} wanted frames repeat the last good one"
        notice(f"{file.where}: {file.label} {what} (this is logged once)", "video damaged")
    images[there:] = images[there - 1]
    return DecodedVideo(images, plan.timestamps, plan.fps, 1 / length.spacing, length.frames)


def _reached(times: Sequence[float], end: float, length: VideoLength) -> int:
    """Number of the wanted times within the decoded part, whose last frame begins at `end`."""
    spacing = length.spacing
    last = length.seconds - spacing if length.last is None else length.last
    if end >= last - 1.5 * spacing:
        return len(times)
    return bisect.bisect_right(times, end + 1.5 * spacing)


def _video_stream(container: InputContainer, file: MediaFile) -> VideoStream:
    """The first video stream that isn't a cover picture."""
    streams = [stream for stream in container.streams.video if not int(stream.disposition) & _COVER]
    if not streams:
        kinds = ", ".join(sorted({stream.type for stream in container.streams})) or "nothing"
        raise file.fault(f"has no video in it; it holds {kinds}", "file without video")
    if streams[0].codec_context is None:
        raise file.fault("is encoded in a way that this FFmpeg doesn't know", "video can't be decoded")
    use_one_thread(streams[0])
    return streams[0]


def _rate(stream: VideoStream) -> float:
    return float(stream.average_rate or stream.guessed_rate or 25)


def _index(stream: VideoStream) -> list[Any]:
    """Entries of the file's index for frames that are shown."""
    return [entry for entry in getattr(stream, "index_entries", ()) if not entry.is_discard]


def _header_length(
    container: InputContainer, stream: VideoStream, first: VideoFrame, deadline: Deadline
) -> VideoLength:
    """The length in the header; one without frames: the file has to be read through."""
    unknown = VideoLength(1.0, 0, False)
    seconds = float(header_seconds(stream) or (container.duration or 0) / 1e6)
    if not seconds:
        return unknown
    if not stream.frames:
        return VideoLength(seconds, max(1, round(seconds * _rate(stream))), False)
    times = np.array([entry.timestamp for entry in _index(stream)])
    if not len(times):
        return VideoLength(seconds, stream.frames, True)
    # The index has decoding times only; where they are even, presentation times are, but for the last ones.
    steps = np.diff(times)
    even = len(times) == stream.frames
    if len(steps):
        step = (times[-1] - times[0]) / len(steps)
        if steps.max() > 3 * max(steps.min(), 1):
            return unknown
        if even and seconds / float(stream.time_base) > (len(times) + _TOLERANCE) * step:  # the last one is a long one
            return unknown
        if even and first.pts is not None and first.pts != times[0]:
            last = _last_begin(container, stream, times, deadline)
            if last is not None and abs(last - first.pts - len(steps) * step) > _TOLERANCE * step:
                return unknown
        even = even and steps.max() - steps.min() <= max(2, step / 10)
    return VideoLength(seconds, len(times), even)


def _last_begin(container: InputContainer, stream: VideoStream, times: np.ndarray, deadline: Deadline) -> int | None:
    """The timestamp of the last frame, from the last packets of the file; None if they can't be read."""
    container.seek(int(times[-REORDERED - 1 :][0]), stream=stream, any_frame=True)
    begins = [packet.pts for packet in packets_of(container, stream, deadline) if packet.pts is not None]
    return max(begins, default=None)


def _rgb(frame: VideoFrame, size: tuple[int, int], turns: int) -> np.ndarray:
    width, height = size[::-1] if turns % 2 else size
    return np.rot90(frame.to_ndarray(format="rgb24", width=width, height=height, interpolation="BICUBIC"), turns)
