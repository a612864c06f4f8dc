"""Files of moving pictures and sound, opened by PyAV with a limit on time."""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from collections.abc import Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, Any, TypeAlias

from mindspeed_mm.data.media.media_files import MediaFile
from mindspeed_mm.utils.errors import BadSample
from mindspeed_mm.utils.extras import require_extra

if TYPE_CHECKING:
    from av.audio.stream import AudioStream
    from av.container import InputContainer
    from av.video.stream import VideoStream

MediaStream: TypeAlias = "AudioStream | VideoStream"


class Deadline:
    """The seconds that reading one medium may take.

    Args:
        file: The medium, for the message.
        kind: "video" or "sound", for the message.
        seconds: The limit.
    """

    def __init__(self, file: MediaFile, kind: str, seconds: float) -> None:
        self._file, self._kind, self._seconds = file, kind, seconds
        self._end = time.monotonic() + seconds

    def check(self) -> None:
        """Raise BadSample if the time is up."""
        if time.monotonic() > self._end:
            raise self._file.fault(
                f"takes longer than {self._seconds:g} s to read as a {self._kind} "
                "(preprocess_parameters.media_timeout)",
                f"{self._kind} takes too long",
            )


@contextlib.contextmanager
def open_container(file: MediaFile, kind: str, seconds: float) -> Iterator[tuple[InputContainer, Deadline]]:
    """Open a file with PyAV; its errors become BadSamples.

    Args:
        file: The medium.
        kind: "video" or "sound", for messages.
        seconds: Time limit of the whole reading, which is checked where the caller calls `Deadline.check`, and inside
            a read that waits.

    Raises:
        BadSample: The file can't be opened or decoded.
        ConfigError: No package that reads it is installed.
    """
    require_extra("video" if kind == "video" else "audio", f"{file.label}: a {kind}")
    import av

    deadline = Deadline(file, kind, seconds)
    try:
        with av.open(file.open(), timeout=seconds, metadata_errors="replace") as container:
            yield container, deadline
    except (BadSample, MemoryError):
        raise
    except Exception as error:  # FFmpeg's own errors are subclasses of many built-in ones
        deadline.check()
        what = getattr(error, "strerror", None) or str(error) or type(error).__name__
        problem = f"can't be decoded as a {kind}: {what} ({file.beginning()})"
        raise file.fault(problem, f"{kind} can't be decoded") from None


def packets_of(container: InputContainer, stream: MediaStream, deadline: Deadline) -> Iterator[Any]:
    """Yield the packets of a stream from the container's position; a truncated file ends early."""
    import av

    with contextlib.suppress(av.error.InvalidDataError, av.error.EOFError):
        for packet in container.demux(stream):
            deadline.check()
            if packet.size:
                yield packet


def decode(container: InputContainer, stream: MediaStream, deadline: Deadline) -> Iterator[Any]:
    """Yield the frames of a stream in the order of presentation, from the container's position to its end.

    Packets that can't be decoded are left out. The file may end early.
    """
    import av

    for packet in itertools.chain(packets_of(container, stream, deadline), (None,)):
        with contextlib.suppress(av.error.InvalidDataError, av.error.EOFError):
            yield from stream.decode(packet)  # None: flush the decoder


def use_one_thread(stream: MediaStream) -> None:
    """Let a decoder use one thread: each loader worker has one core."""
    stream.codec_context.thread_type = "NONE"
    stream.codec_context.thread_count = 1


def header_seconds(stream: MediaStream) -> Fraction | None:
    """Return the duration of a stream in its header; None if there is none."""
    if stream.duration and stream.duration > 0:
        return stream.duration * stream.time_base
    tag = re.fullmatch(r"(\d+):(\d+):(\d+(?:\.\d+)?)", stream.metadata.get("DURATION", ""))  # Matroska
    return int(tag[1]) * 3600 + int(tag[2]) * 60 + Fraction(tag[3]) if tag else None
