"""Read the frames of an open video with their times, skipping to key frames over those that aren't wanted."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mindspeed_mm.data.media.containers import Deadline, decode

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.stream import VideoStream

#: containers round timestamps, in seconds
_SLACK = 0.003
#: frames between which a decoder may change the order (the most that H.264 and HEVC allow)
REORDERED = 16

TimedFrame = tuple[float, Any]


class FrameSource:
    """Reads chosen frames of a video stream; frames are PyAV's, not converted.

    Args:
        container: The open file, at its beginning.
        stream: Its video stream.
        first: Timestamp of the first frame, in units of the stream; times are counted from it.
        spacing: Seconds from one frame to the next, on average.
        deadline: Time limit.

    Attributes:
        end: time of the last frame after the file has been decoded to its end; None before.
    """

    def __init__(
        self, container: InputContainer, stream: VideoStream, first: int, spacing: float, deadline: Deadline
    ) -> None:
        self.end: float | None = None
        self._container, self._stream, self._deadline = container, stream, deadline
        self._first, self._spacing, self._unit = first, spacing, float(stream.time_base)
        self._worth = 2 * REORDERED * spacing  # a jump over less saves nothing
        self._keys: list[int] | None = None

    def every(self, count: int) -> Iterator[TimedFrame]:
        """Yield the first `count` frames with their times; fewer if the file ends before."""
        return itertools.islice(self._following(), count)

    def shown_at(self, times: Sequence[float]) -> Iterator[TimedFrame]:
        """Yield, for each of the ascending `times`, the frame that is shown then, and when that frame began.

        The last frame of the file is shown without end. Nothing is yielded of a file without frames.
        """
        if len(times) > 1 and times[1] - times[0] >= self._worth and self._container.format.name.startswith("matroska"):
            self._container.seek(self._first, stream=self._stream)  # Matroska reads its index at the first seek
        frames = self._following()
        shown, following = None, next(frames, None)
        for wanted in times:
            jumped = self._jump(shown[0], wanted) if shown is not None and following is not None else None
            if jumped is not None:
                frames, following = jumped, next(jumped, None)
            while following is not None and (shown is None or following[0] <= wanted + _SLACK):
                shown, following = following, next(frames, None)
            if shown is None:
                return
            if following is None:
                self.end = shown[0]
            yield shown

    def _following(self) -> Iterator[TimedFrame]:
        time = -self._spacing
        for frame in decode(self._container, self._stream, self._deadline):
            time = time + self._spacing if frame.pts is None else (frame.pts - self._first) * self._unit
            yield time, frame

    def _jump(self, shown: float, wanted: float) -> Iterator[TimedFrame] | None:
        """Seek to the last key frame before `wanted` if that skips enough frames; None if decoding on is as fast.

        The index has decoding times, which come before presentation times by up to `REORDERED` frames.
        """
        margin = self._worth / 2
        if wanted - shown < self._worth:
            return None
        keys = self._key_frames()
        place = bisect.bisect_right(keys, (wanted - margin) / self._unit + self._first) - 1
        if place < 0 or (keys[place] - self._first) * self._unit < shown + margin:
            return None
        # Some containers seek by presentation time: the margin keeps them from taking the key frame before.
        self._container.seek(keys[place] + round(margin / self._unit), stream=self._stream)
        # What comes before the key frame refers to frames that were skipped.
        frames = itertools.dropwhile(lambda timed: not timed[1].key_frame, self._following())
        landed = next(frames, None)
        if landed is not None and landed[0] <= wanted:
            return itertools.chain((landed,), frames)
        self._keys = []  # the index is wrong, or the file is cut: once from the beginning, without jumps
        self._container.seek(self._first, stream=self._stream)
        return self._following()

    def _key_frames(self) -> list[int]:
        """Timestamps of the key frames in the file's index; empty without an index."""
        if self._keys is None:
            entries = getattr(self._stream, "index_entries", ())
            self._keys = sorted(entry.timestamp for entry in entries if entry.is_keyframe)
        return self._keys
