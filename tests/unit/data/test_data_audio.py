"""Sounds of every kind of file, at the model's rate and exactly as long as foreseen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.signal import resample_poly

from mindspeed_mm.data.media.audio import SoundFacts, SoundRule, look_sound, read_sound
from mindspeed_mm.data.media.media import MediaRef
from mindspeed_mm.data.media.media_files import find_media
from mindspeed_mm.utils.errors import BadSample
from mindspeed_mm.utils.log import forget_notices
from tests.support.clips import real_clips, tone, write_clip, write_sound, write_wav

ROW = "rows.json, row 3"
RULE = SoundRule(16_000, None, 0)


def _read(path: Path, rule: SoundRule = RULE) -> np.ndarray:
    file = find_media(MediaRef("audio", str(path)), [""], ROW)
    facts = look_sound(file, 60.0)
    sound = read_sound(file, facts, rule, 60.0)
    assert sound.dtype == np.float32 and sound.shape == (rule.samples(facts),) and np.abs(sound).max(initial=0) <= 1
    return sound


def _loudest(sound: np.ndarray, rate: int = 16_000) -> float:
    spectrum = np.abs(np.fft.rfft(sound * np.hanning(len(sound)), 8 * len(sound)))
    return float(spectrum.argmax()) * rate / (8 * len(sound))


def test_pcm_at_the_models_rate_is_read_as_it_stands(tmp_path: Path) -> None:
    samples = np.random.default_rng(0).uniform(-1, 1, (1, 5_000))
    sound = _read(write_wav(tmp_path / "noise.wav", samples, 16_000))
    assert np.array_equal(sound, np.rint(samples[0] * 32767).astype(np.float32) / 32768)


def test_channels_are_averaged(tmp_path: Path) -> None:
    left, right = tone(440, 0.5, 16_000, 0.9), tone(1_000, 0.5, 16_000, 0.7)
    sound = _read(write_wav(tmp_path / "stereo.wav", np.stack([left, right]), 16_000))
    assert np.allclose(sound, (left + right) / 2, atol=1e-4)


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000])
def test_other_rates_equal_an_independent_resampling(tmp_path: Path, rate: int) -> None:
    """In the band that both filters pass: the same samples, no shift, the foreseen length."""
    samples = tone(440, 1.3, rate) + tone(2_500, 1.3, rate, 0.3)
    sound = _read(write_wav(tmp_path / "tones.wav", samples, rate))
    common = np.gcd(rate, 16_000)
    expected = resample_poly(samples, 16_000 // common, rate // common)
    assert len(sound) == (2 * len(samples) * 16_000 + rate) // (2 * rate)
    assert abs(len(sound) - len(expected)) <= 1
    inner = slice(400, len(sound) - 400)
    assert np.abs(sound[inner] - expected[inner]).max() < 2e-3
    assert np.abs(sound[-8:]).max() > 0.01, "the end isn't missing"


def test_what_the_lower_rate_cannot_hold_is_filtered_out(tmp_path: Path) -> None:
    sound = _read(write_wav(tmp_path / "high.wav", tone(15_000, 1.0, 48_000), 48_000))
    assert np.sqrt(np.mean(sound[500:-500] ** 2)) < 1e-3


CODECS = [("a.flac", "flac", 22_050), ("a.mp3", "libmp3lame", 44_100), ("a.m4a", "aac", 44_100),
          ("a.ogg", "libopus", 48_000), ("a.mka", "aac", 32_000), ("a.aac", "aac", 44_100),
          ("a.wav", "pcm_u8", 8_000), ("b.wav", "pcm_f32le", 48_000), ("c.wav", "pcm_mulaw", 8_000)]  # fmt: skip


@pytest.mark.parametrize(("name", "codec", "rate"), CODECS)
def test_formats_give_their_tone_and_length(tmp_path: Path, name: str, codec: str, rate: int) -> None:
    import av

    samples = tone(880, 2.3, rate)
    sound = _read(write_sound(tmp_path / name, np.stack([samples, samples]), rate, codec))
    with av.open(str(tmp_path / name)) as container:
        decoded = sum(frame.samples for frame in container.decode(audio=0))
    assert len(sound) == round(decoded * 16_000 / rate)
    # aac without an edit list keeps the encoder's 1,024 samples in front, and whole frames
    assert 2.3 * rate <= decoded <= 2.3 * rate + 2 * 1_024
    assert abs(_loudest(sound) - 880) < 1
    assert np.sqrt(np.mean(sound[2_000:34_000] ** 2)) == pytest.approx(0.5 / np.sqrt(2), rel=0.08)


def test_lossless_and_mp3_lengths_are_exact(tmp_path: Path) -> None:
    """An mp3 file says how much of it is the encoder's padding; that isn't part of the sound."""
    samples = tone(880, 2.3, 44_100)[None]
    for name, codec in (("a.flac", "flac"), ("a.wav", "pcm_s24le"), ("a.mp3", "libmp3lame")):
        assert len(_read(write_sound(tmp_path / name, samples, 44_100, codec))) == 36_800, name


def test_lengths_are_cut_and_padded(tmp_path: Path) -> None:
    rule = SoundRule(16_000, 1.0, 400)
    assert rule.samples(SoundFacts(48_000, 48_000 * 3)) == 16_000
    assert rule.samples(SoundFacts(48_000, 300)) == 400
    lengths = [RULE.samples(SoundFacts(rate, length)) for rate, length in ((48_000, 1), (48_000, 5), (32_000, 3))]
    assert lengths == [1, 2, 2], "the nearest, halves up, at least one"
    path = write_wav(tmp_path / "long.wav", tone(440, 3.0, 44_100), 44_100)
    whole, cut = _read(path), _read(path, rule)
    assert np.allclose(cut, whole[:16_000], atol=1e-6), "what is cut off must not change what is kept"


def test_a_cut_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_notices()
    path = write_wav(tmp_path / "long.wav", tone(440, 1.5, 16_000), 16_000)
    said: list[str] = []
    monkeypatch.setattr("mindspeed_mm.utils.log.logger.warning", said.append)
    for _ in range(2):
        _read(path, SoundRule(16_000, 1.0, 0))
    assert len(said) == 1 and ROW in said[0] and "1.5 s" in said[0] and str(path) in said[0]


def test_damaged_sounds(tmp_path: Path) -> None:
    """A header that promises more: silence for the rest, and a BadSample where less than half is there."""
    noise = np.random.default_rng(0).uniform(-1, 1, (1, 64_000)).astype(np.float32)
    content = write_sound(tmp_path / "a.flac", noise, 16_000, "flac").read_bytes()
    (tmp_path / "most.flac").write_bytes(content[: int(0.8 * len(content))])
    sound = _read(tmp_path / "most.flac")
    assert len(sound) == 64_000 and sound[:40_000].std() > 0.5 and not sound[-10_000:].any()
    (tmp_path / "little.flac").write_bytes(content[: int(0.3 * len(content))])
    with pytest.raises(BadSample, match=r"damaged: 1\.\d\d of 4\.00 s") as raised:
        _read(tmp_path / "little.flac")
    assert raised.value.reason == "sound can't be decoded" and ROW in str(raised.value)


def test_files_without_sound(tmp_path: Path) -> None:
    with pytest.raises(BadSample, match="no sound in it; it holds video") as raised:
        _read(write_clip(tmp_path / "silent.mp4"))
    assert raised.value.reason == "file without sound"
    (tmp_path / "page.mp3").write_text("<html><body>not found</body></html>" * 50, encoding="utf-8")
    with pytest.raises(BadSample, match="<html>") as raised:
        _read(tmp_path / "page.mp3")
    assert raised.value.reason == "sound can't be decoded"


def test_the_sound_of_a_video(tmp_path: Path) -> None:
    sound = _read(write_clip(tmp_path / "clip.mp4", frames=48, sound=2.0))
    assert abs(_loudest(sound) - 440) < 1 and abs(len(sound) - 32_000) < 800
    filmed = _read(real_clips()["bigbuckbunny.mp4"])
    assert abs(len(filmed) / 16_000 - 5.3) < 0.1 and filmed.std() > 0.002
