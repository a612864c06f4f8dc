"""Sounds: any file and any rate as one channel of floats at the model's rate.

A file of M samples at r Hz becomes round(M·R/r) samples at R Hz (halves up), channels averaged; then it is cut to the
longest length that the model takes, or padded with silence to the shortest. M is taken from the header where
that is exact (PCM, FLAC, ALAC); lossy formats are decoded to count it, because their headers count the encoder's
padding too. Where decoding gives less than the header promises (a damaged file), the rest is silence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mindspeed_mm.data.media.containers import decode, header_seconds, open_container, use_one_thread
from mindspeed_mm.data.media.media_files import MediaFile
from mindspeed_mm.utils.log import notice

if TYPE_CHECKING:
    from av.audio.stream import AudioStream
    from av.container import InputContainer

#: floats beyond ±1 are clipped as a player does it; beyond this, 24 dB above the loudest sound, they are no sound's
_FAR_OUT = 16.0
#: formats and encodings that together give the exact length of a sound without decoding it
_EXACT_FORMATS = frozenset(("wav", "w64", "aiff", "au", "caf", "flac", "mov"))
_EXACT_CODECS = ("pcm_", "flac", "alac")


@dataclass(frozen=True)
class SoundFacts:
    """Facts about a sound, known before it is decoded.

    Attributes:
        rate: samples a second.
        length: samples of a channel.
    """

    rate: int
    length: int


@dataclass(frozen=True)
class SoundRule:
    """Rate and length of the sounds that a model takes.

    Attributes:
        rate: samples a second.
        max_seconds: longer sounds are cut; None: they are not.
        min_samples: shorter sounds are padded with silence.
        multiple: sounds are padded with silence to a multiple of this many samples.
    """

    rate: int
    max_seconds: float | None
    min_samples: int
    multiple: int = 1

    def whole(self, facts: SoundFacts) -> int:
        """Samples of the whole sound at the model's rate, at least one."""
        return max(1, (2 * facts.length * self.rate + facts.rate) // (2 * facts.rate))

    def samples(self, facts: SoundFacts) -> int:
        """Samples of the sound as the model gets it."""
        samples = self.whole(facts)
        if self.max_seconds is not None:
            samples = min(samples, round(self.max_seconds * self.rate))
        return -(-max(samples, self.min_samples) // self.multiple) * self.multiple


def look_sound(file: MediaFile, timeout: float) -> SoundFacts:
    """Return rate and length of a sound; lossy formats are decoded for it.

    Raises:
        BadSample: No sound in the file, or one without a sample.
    """
    with open_container(file, "sound", timeout) as (container, deadline):
        stream = _sound_stream(container, file)
        codec = stream.codec_context
        rate, length = codec.sample_rate, 0
        if container.format.name.split(",")[0] in _EXACT_FORMATS and codec.name.startswith(_EXACT_CODECS):
            length = round((header_seconds(stream) or 0) * rate)
        if not length:
            for frame in decode(container, stream, deadline):
                rate, length = frame.sample_rate, length + frame.samples
    if not length or not rate:
        raise file.fault("holds no sound: its length is 0 samples", "sound is empty")
    return SoundFacts(rate, length)


def read_sound(file: MediaFile, facts: SoundFacts, rule: SoundRule, timeout: float) -> np.ndarray:
    """Decode a sound.

    Args:
        file: The sound, or a video whose sound track is wanted.
        facts: The result of `look_sound`.
        rule: Rate and length for the model.
        timeout: Time limit in seconds.

    Returns:
        [rule.samples(facts)] float32 between -1 and 1.

    Raises:
        BadSample: Less than half of the sound can be decoded, or it takes too long; samples are NaN or infinite, or far
            out of range.
    """
    wanted, whole = rule.samples(facts), rule.whole(facts)
    taken = min(wanted, whole)
    if taken < whole:
        notice(
            f"{file.where}: {file.label} lasts {whole / rule.rate:.1f} s; the model takes {taken / rule.rate:g} s, the "
            "rest is left out (this is logged once)",
            "sound cut",
        )
    # What is resampled is a little longer than what is kept: the filter needs samples after the last one.
    needed = facts.length if taken == whole else taken * facts.rate // rule.rate + facts.rate // 10
    pieces, count = [], 0
    with open_container(file, "sound", timeout) as (container, deadline):
        stream = _sound_stream(container, file)
        for piece in _mono(decode(container, stream, deadline)):
            pieces.append(piece)
            count += len(piece)
            if count >= needed:
                break
        whole_samples = np.concatenate(pieces)[:needed] if pieces else np.empty(0, np.float32)
        _check_samples(file, whole_samples, facts.rate)
        sound = _resampled(whole_samples, facts.rate, rule.rate) if pieces else whole_samples
    if 2 * min(len(sound), taken) < taken:
        seconds = f"{count / facts.rate:.2f} of {min(needed, facts.length) / facts.rate:.2f} s"
        raise file.fault(f"is damaged: {seconds} can be decoded; at least half is needed", "sound can't be decoded")
    if count + facts.rate // 10 < min(needed, facts.length):
        notice(f"{file.where}: {file.label} is damaged: its end is silence (this is logged once)", "sound damaged")
    out = np.zeros(wanted, np.float32)
    kept = sound[:taken]
    np.clip(kept, -1, 1, out=out[: len(kept)])
    return out


def _check_samples(file: MediaFile, samples: np.ndarray, rate: int) -> None:
    """Refuse samples that aren't between -1 and 1: files of floats may have any values."""
    finite = np.isfinite(samples)
    if not finite.all():
        place = int(np.argmin(finite))
        raise file.fault(
            f"holds samples that are no numbers: {np.count_nonzero(~finite)} of {len(samples)} are NaN or infinite, "
            f"the first at {place / rate:.3f} s",
            "sound isn't finite",
        )
    peak = float(np.abs(samples).max(initial=0.0))
    if peak > _FAR_OUT:
        raise file.fault(
            f"holds samples up to {peak:.6g}, and floats of a sound lie between -1 and 1; scale them (16-bit numbers "
            "by 1/32768)",
            "sound out of range",
        )


def _sound_stream(container: InputContainer, file: MediaFile) -> AudioStream:
    if not container.streams.audio:
        kinds = ", ".join(sorted({stream.type for stream in container.streams})) or "nothing"
        raise file.fault(f"has no sound in it; it holds {kinds}", "file without sound")
    stream = container.streams.audio[0]
    if stream.codec_context is None:
        raise file.fault("is encoded in a way that this FFmpeg doesn't know", "sound can't be decoded")
    use_one_thread(stream)
    return stream


def _mono(frames: Iterator[Any]) -> Iterator[np.ndarray]:
    """Frames of any sample format as [samples] float32: the mean of the channels."""
    import av

    convert = av.AudioResampler(format="fltp")
    for frame in frames:
        for same in convert.resample(frame):
            yield same.to_ndarray().mean(axis=0, dtype=np.float32)


def _resampled(sound: np.ndarray, rate: int, to: int) -> np.ndarray:
    import av

    if rate == to:
        return sound
    frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(sound[None]), format="fltp", layout="mono")
    frame.sample_rate = rate
    change = av.AudioResampler(format="fltp", layout="mono", rate=to)
    return np.concatenate([piece.to_ndarray()[0] for piece in (*change.resample(frame), *change.resample(None))])
