"""Frames of a clip: choose their times, and decode them.

**Which times.** Seconds count from the clip's first frame, or that of its `cut`. A step is
`frame_interval × speed_factor ÷ train_fps`, and never less than `speed_factor` of the clip's own frames: of evenly
spaced frames none is taken twice. A clip that lasts D seconds gives the frames at 0, step, 2·step, … below D. Where it
gives fewer than are wanted and `auto_interval` is on, the step becomes smaller, down to the clip's own frames. The
frame at a time is the last one that began before it, by the file's own timestamps; one that is shown for long may be
taken several times.

**Where they begin.** A clip that lasts longer than its bucket begins at any of its own frames, drawn from the sample's
key; in evaluation, in the middle. `zero_start`: at its beginning. `keep_last`: so that its last frame is the last one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mindspeed_mm.configs.generation_data import GenerationPreprocessParameters
from mindspeed_mm.data.generation.annotations import Annotation
from mindspeed_mm.data.generation.buckets import Bucket
from mindspeed_mm.data.generation.transforms import cover_size, crop_of, scaled_crop
from mindspeed_mm.data.media.images import image_size, read_image
from mindspeed_mm.data.media.media_files import MediaFile
from mindspeed_mm.data.media.video import FramePlan, FrameRule, VideoFacts, VideoLength, look_video, read_clip

TOO_SHORT = "clip too short"
_TINY = 1e-6
#: all frames are wanted: a file whose header lacks their number is read through
_ALL_FRAMES = FrameRule(fps=1e6, min_frames=1, max_frames=1 << 40, multiple=1)


@dataclass(frozen=True)
class ClipGeometry:
    """Size and duration of a clip, which decide its shape.

    Attributes:
        width, height: size of the part of the picture that is used, in pixels.
        begin, seconds: beginning of the clip in its file, and its duration.
        spacing: seconds from one of its frames to the next, on average (how long the last one is shown doesn't
            count); 0: a picture.
    """

    width: int
    height: int
    begin: float = 0.0
    seconds: float = 0.0
    spacing: float = 0.0


@dataclass(frozen=True)
class OpenedClip:
    """A clip or a picture that has been looked at.

    Attributes:
        row: its annotation.
        file: its file.
        facts: size and duration.
        found: of a clip, the facts in its file's header; None: a picture.
        size: width and height of the whole picture.
    """

    row: Annotation
    file: MediaFile
    facts: ClipGeometry
    found: VideoFacts | None
    size: tuple[int, int]


class ClipReader:
    """Reads clips and pictures.

    Args:
        param: `preprocess_parameters`.
    """

    def __init__(self, param: GenerationPreprocessParameters) -> None:
        self._param = param

    def facts(self, row: Annotation, file: MediaFile) -> ClipGeometry:
        """Return a clip's size and duration: from its row where that is complete, else from the file's header.

        Raises:
            BadSample: The file isn't a clip or a picture, or has other frames than in its row.
        """
        if not row.is_complete:
            return self.look(row, file).facts
        assert row.width is not None and row.height is not None
        if row.ref.kind == "image":
            return _cut(row, file, row.width, row.height, None)
        assert row.frames is not None and row.fps is not None
        return _cut(row, file, row.width, row.height, VideoLength(row.frames / row.fps, row.frames, True))

    def look(self, row: Annotation, file: MediaFile) -> OpenedClip:
        """Read a file's header.

        Raises:
            BadSample: It isn't a clip or a picture, or has other frames than in its row.
        """
        if row.ref.kind == "image":
            width, height = image_size(file, self._param.media_max_pixels)
            return OpenedClip(row, file, _cut(row, file, width, height, None), None, (width, height))
        found = look_video(file, _ALL_FRAMES, self._param.media_timeout, self._param.media_max_pixels)
        facts = _cut(row, file, found.width, found.height, found.length)
        return OpenedClip(row, file, facts, found, (found.width, found.height))

    def step(self, facts: ClipGeometry, wanted: int) -> float:
        """Return the seconds from one taken frame to the next, of a clip that gives `wanted` frames."""
        param = self._param
        least = facts.spacing * param.speed_factor
        rate = param.train_fps
        step = param.frame_interval * param.speed_factor * (facts.spacing if rate is None else 1 / rate)
        step = max(step, least)
        if param.auto_interval and wanted > 1 and facts.seconds < (wanted - 1) * step + _TINY:
            step = max(least, (facts.seconds - _TINY) / wanted)
        return step

    def frames(self, facts: ClipGeometry, wanted: int) -> int:
        """Return how many frames a clip can give, at most `wanted`."""
        if not facts.spacing:
            return 1
        return min(wanted, max(1, math.ceil(facts.seconds / self.step(facts, wanted) - 1e-4)))

    def times(self, facts: ClipGeometry, wanted: int, place: float | None) -> list[float]:
        """Return the seconds, in the file, at which the frames of a clip are shown.

        Args:
            facts: The facts of the clip.
            wanted: Number of frames; no more than the result of `frames`.
            place: In [0, 1): chooses one of the possible beginnings; None: the middle.
        """
        step, param = self.step(facts, wanted), self._param
        slack = facts.seconds - facts.spacing - (wanted - 1) * step
        places = max(1, math.floor(slack / facts.spacing + 1e-3) + 1)
        if param.zero_start:
            begin = 0.0
        elif param.keep_last:
            begin = max(0.0, slack)
        else:
            begin = facts.spacing * (places // 2 if place is None else int(place * places))
        return [facts.begin + begin + number * step for number in range(wanted)]

    def read(self, clip: OpenedClip, bucket: Bucket, place: float | None, covers: bool) -> np.ndarray:
        """Decode the frames of a clip.

        Args:
            clip: The result of `look`.
            bucket: The shape of the sample.
            place: As in `times`.
            covers: Scale frames so that they cover the bucket; else they keep their size.

        Returns:
            [frames, height, width, 3] uint8.

        Raises:
            BadSample: The file can't be decoded, or has too few frames for the bucket.
        """
        facts, (width, height) = clip.facts, clip.size
        if (given := self.frames(facts, bucket.frames)) < bucket.frames:
            stated = "" if clip.row.frames is None else f" (its row says that the file has {clip.row.frames} frames)"
            raise clip.file.fault(f"gives {given} frames{stated}, and {bucket.frames} are needed", TOO_SHORT)
        size = clip.size
        if covers:
            across, down = cover_size(facts.width, facts.height, bucket)
            size = round(width * across / facts.width), round(height * down / facts.height)
        part = crop_of(clip.row.crop, width, height)
        rows, columns = scaled_crop(part, (size[0] / width, size[1] / height))
        if clip.found is None:
            return np.array(read_image(clip.file, size, most=self._param.media_max_pixels))[None, rows, columns]
        times = self.times(facts, bucket.frames, place)
        plan = FramePlan(times, len(times), len(times), 1 / self.step(facts, len(times)))
        return read_clip(clip.file, clip.found, plan, size, self._param.media_timeout).frames[:, rows, columns]


def _cut(row: Annotation, file: MediaFile, width: int, height: int, length: VideoLength | None) -> ClipGeometry:
    """The part of a file that a row names; without a length it is a picture."""
    try:
        left, right, top, bottom = crop_of(row.crop, width, height)
    except ValueError as error:
        raise file.fault(str(error), "crop out of the picture") from None
    if length is None:
        return ClipGeometry(right - left, bottom - top)
    begin, end = 0.0, length.seconds
    if row.cut is not None:
        begin, end = length.begin(row.cut[0]), length.begin(row.cut[1])
        if begin >= end:
            raise file.fault(f"has {length.frames} frames, and 'cut' is {list(row.cut)}", "cut out of the clip")
    return ClipGeometry(right - left, bottom - top, begin, end - begin, length.spacing)
