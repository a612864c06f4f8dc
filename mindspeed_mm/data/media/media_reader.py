"""Reads the media of a row, images, videos and sounds alike: their geometry, and the decoded medium."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from mindspeed_mm.configs.data_config import PreprocessParameters
from mindspeed_mm.data.media.audio import SoundFacts, SoundRule, look_sound, read_sound
from mindspeed_mm.data.media.images import WIDEST_RATIO, PixelLimits, fit_size, image_size, read_image
from mindspeed_mm.data.media.media import DecodedVideo, Geometry, MediaRef
from mindspeed_mm.data.media.media_files import MediaFile, find_media
from mindspeed_mm.data.media.video import FrameRule, VideoFacts, look_video, plan_frames, read_clip

if TYPE_CHECKING:
    from PIL import Image

_REMEMBERED = 16_384
_PICTURES_FPS = 2.0  # of a clip given as pictures, where neither the row nor data.json has it

FactsT = TypeVar("FactsT")


@dataclass(frozen=True)
class MediaLimits:
    """Limits of a model's processor; those of data.json apply in addition.

    Attributes:
        image_min_pixels: area below which the processor enlarges an image by itself.
        image_factor: shortest side of an image or a frame that it accepts, in pixels (patch × merge).
        video_min_pixels: the same area for a frame of a video.
        video_fps: frames taken of a second of video.
        video_min_frames, video_max_frames: least and most frames taken of a video.
        temporal_patch: the number of frames is made a multiple of this.
        sampling_rate: samples of sound a second.
        max_audio_seconds: a sound is cut to this; None takes all of it.
        min_audio_samples: shorter sounds are padded with silence to this.
        audio_multiple: the number of samples is made a multiple of this, with silence.
    """

    image_min_pixels: int = 0
    image_factor: int = 1
    video_min_pixels: int = 0
    video_fps: float = 2.0
    video_min_frames: int = 1
    video_max_frames: int = 768
    temporal_patch: int = 1
    sampling_rate: int = 16_000
    max_audio_seconds: float | None = None
    min_audio_samples: int = 0
    audio_multiple: int = 1


class MediaReader:
    """Reads the media of rows. Instances can be pickled and forked.

    `look` and `open` agree: the result of `open` has the height, width, frames and samples that `look` returned.

    Args:
        options: `preprocess_parameters` of data.json.
        defaults: Limits of the model's processor.
    """

    def __init__(self, options: PreprocessParameters, defaults: MediaLimits) -> None:
        ratio = min(options.max_aspect_ratio or WIDEST_RATIO, WIDEST_RATIO)
        self._image = PixelLimits(
            options.image_max_pixels,
            options.image_min_pixels,
            defaults.image_factor,
            defaults.image_min_pixels,
            ratio,
        )
        self._video = PixelLimits(
            options.video_max_pixels,
            options.video_min_pixels,
            defaults.image_factor,
            defaults.video_min_pixels,
            ratio,
        )
        self._frames = FrameRule(
            options.video_fps or defaults.video_fps,
            defaults.video_min_frames,
            options.video_maxlen or defaults.video_max_frames,
            defaults.temporal_patch,
        )
        self._sound = SoundRule(
            options.audio_sampling_rate or defaults.sampling_rate,
            defaults.max_audio_seconds,
            defaults.min_audio_samples,
            defaults.audio_multiple,
        )
        self._pictures_fps = options.video_fps or _PICTURES_FPS
        self._fast = options.image_decoder == "fast"
        self._timeout, self._most = options.media_timeout, options.media_max_pixels
        self._seen: OrderedDict[Any, Any] = OrderedDict()

    @property
    def sampling_rate(self) -> int:
        """Samples a second of the sounds that `open` returns."""
        return self._sound.rate

    def locate(self, ref: MediaRef, folders: Sequence[str], where: object) -> str:
        """Return the full path of a medium: in the first of `folders` where it exists.

        Raises:
            BadSample: It is in none; the message has the row and every full path that was tried.
        """
        return find_media(ref, folders, where).path

    def look(self, ref: MediaRef, folders: Sequence[str], where: object) -> Geometry:
        """Return the geometry of a medium as `open` will return it.

        Args:
            ref: The medium as the row names it.
            folders: Where relative paths are looked for, in order.
            where: The row, for messages.

        Raises:
            BadSample: The medium doesn't exist or can't be used; message with row and path, reason to count by.
        """
        if ref.frames:
            return self._look_pictures(ref, self._find_pictures(ref, folders, where))
        file = find_media(ref, folders, where)
        if ref.kind == "image":
            width, height = self._image_size(file)
            return Geometry("image", height, width)
        if ref.kind == "audio":
            return Geometry("audio", samples=self._sound.samples(self._sound_facts(file)))
        rule = self._rule(ref)
        facts = self._video_facts(file, rule)
        plan = plan_frames(facts, rule)
        width, height = _fitted(file, facts.width, facts.height, self._video, "video")
        return Geometry("video", height, width, plan.count, plan.fps, times=plan.timestamps)

    def open(self, ref: MediaRef, folders: Sequence[str], where: object) -> Image.Image | DecodedVideo | np.ndarray:
        """Decode a medium.

        Args:
            ref: The medium as the row names it.
            folders: Where relative paths are looked for, in order.
            where: The row, for messages.

        Returns:
            An RGB picture, a `DecodedVideo`, or a sound: [samples] float32 between -1 and 1.

        Raises:
            BadSample: As `look`, and where decoding fails.
        """
        if ref.frames:
            return self._open_pictures(ref, self._find_pictures(ref, folders, where))
        file = find_media(ref, folders, where)
        if ref.kind == "image":
            return read_image(file, self._image_size(file), self._fast, self._most)
        if ref.kind == "audio":
            return read_sound(file, self._sound_facts(file), self._sound, self._timeout)
        rule = self._rule(ref)
        facts = self._video_facts(file, rule)
        size = _fitted(file, facts.width, facts.height, self._video, "video")
        return read_clip(file, facts, plan_frames(facts, rule), size, self._timeout)

    def _image_size(self, file: MediaFile) -> tuple[int, int]:
        width, height = self._facts("image", file, lambda: image_size(file, self._most))
        return _fitted(file, width, height, self._image, "image")

    def _rule(self, ref: MediaRef) -> FrameRule:
        """How frames of a video are taken: the row's own rate has precedence over data.json's."""
        return replace(self._frames, fps=ref.fps) if ref.fps else self._frames

    def _video_facts(self, file: MediaFile, rule: FrameRule) -> VideoFacts:
        return self._facts(f"video at {rule.fps}", file, lambda: look_video(file, rule, self._timeout, self._most))

    def _sound_facts(self, file: MediaFile) -> SoundFacts:
        return self._facts("audio", file, lambda: look_sound(file, self._timeout))

    def _facts(self, kind: str, file: MediaFile, look: Callable[[], FactsT]) -> FactsT:
        """The result of `look`, cached for files until they change; bytes of a row have no key to cache by."""
        if file.key is None:
            return look()
        key = kind, *file.key
        found = self._seen.pop(key, None) or look()
        self._seen[key] = found
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        return found

    def _find_pictures(self, ref: MediaRef, folders: Sequence[str], where: object) -> list[MediaFile]:
        """The pictures of a clip; where there are more than the most frames, evenly chosen ones."""
        files = [find_media(frame, folders, where) for frame in ref.frames]
        taken = min(len(files), self._frames.most)
        return [files[number * len(files) // taken] for number in range(taken)]

    def _look_pictures(self, ref: MediaRef, files: Sequence[MediaFile]) -> Geometry:
        """A clip of pictures has the size of its first one."""
        width, height = self._facts("image", files[0], lambda: image_size(files[0], self._most))
        width, height = _fitted(files[0], width, height, self._video, "video")
        taken, total, count = len(files), len(ref.frames), self._frames.padded(len(files))
        fps = ref.fps or self._pictures_fps
        times = tuple(min(number, taken - 1) * total // taken / fps for number in range(count))
        return Geometry("video", height, width, count, fps * taken / total, times=times)

    def _open_pictures(self, ref: MediaRef, files: Sequence[MediaFile]) -> DecodedVideo:
        geometry = self._look_pictures(ref, files)
        size = geometry.width, geometry.height
        images = np.empty((geometry.frames, geometry.height, geometry.width, 3), np.uint8)
        for number, file in enumerate(files):
            images[number] = np.asarray(read_image(file, size, self._fast, self._most))
        images[len(files) :] = images[len(files) - 1]
        return DecodedVideo(images, geometry.times, geometry.fps, ref.fps or self._pictures_fps, len(ref.frames))


def _fitted(file: MediaFile, width: int, height: int, limits: PixelLimits, kind: str) -> tuple[int, int]:
    size = fit_size(width, height, limits)
    if size is None:
        raise file.fault(
            f"is {width}×{height} pixels; the longer side may be {limits.max_ratio:g} times the shorter one "
            "(preprocess_parameters.max_aspect_ratio)",
            f"{kind} too narrow",
        )
    return size
