"""Images of every mode, upright, RGB and of a legal size; what the header says is what decoding gives."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from mindspeed_mm.data.media.images import PixelLimits, fit_size, image_size, read_image, to_rgb
from mindspeed_mm.data.media.media import MediaRef
from mindspeed_mm.data.media.media_files import MediaFile, find_media
from mindspeed_mm.utils.errors import BadSample

ROW = "rows.json, row 3"


def _file(path: Path) -> MediaFile:
    return find_media(MediaRef("image", str(path)), [""], ROW)


def _bytes(content: bytes) -> MediaFile:
    return find_media(MediaRef("image", "x", content), [""], ROW)


def _encoded(picture: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def _exif(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def _corners() -> Image.Image:
    pixels = np.full((16, 24, 3), 255, np.uint8)
    pixels[:8, :12], pixels[8:, :12] = (255, 0, 0), (0, 255, 0)
    return Image.fromarray(pixels)


def test_every_mode_becomes_rgb_over_white(tmp_path: Path) -> None:
    """I04: transparent areas are white; palettes, grey, 16-bit and floating-point grey keep their tones."""
    clear = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    half = Image.new("RGBA", (4, 4), (255, 0, 0, 128))
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([0, 0, 0, 10, 20, 30])
    holed = palette.copy()
    holed.info["transparency"] = 1
    grey16 = Image.fromarray(np.full((4, 4), 32896, dtype=np.uint16))
    holed16 = grey16.copy()
    holed16.info["transparency"] = 32896
    expected = [
        (clear, (255, 255, 255)), (half, (255, 127, 127)), (Image.new("LA", (4, 4), (0, 0)), (255, 255, 255)),
        (palette, (10, 20, 30)), (holed, (255, 255, 255)), (Image.new("L", (4, 4), 77), (77, 77, 77)),
        (Image.new("1", (4, 4), 1), (255, 255, 255)), (Image.new("CMYK", (4, 4), (0, 0, 0, 0)), (255, 255, 255)),
        (grey16, (128, 128, 128)), (holed16, (255, 255, 255)), (Image.new("I", (4, 4), 100), (100, 100, 100)),
        (Image.new("I", (4, 4), 65535), (255, 255, 255)), (Image.new("F", (4, 4), 0.5), (128, 128, 128)),
        (Image.new("F", (4, 4), 300.0), (255, 255, 255)), (Image.new("F", (4, 4), 77.0), (77, 77, 77)),
    ]  # fmt: skip
    for number, (picture, colour) in enumerate(expected):
        shown = to_rgb(picture)
        assert (shown.mode, shown.getpixel((1, 1))) == ("RGB", colour), number
    for number, picture in enumerate((clear, holed, grey16, holed16)):
        picture.save(tmp_path / f"{number}.png")
        assert read_image(_file(tmp_path / f"{number}.png")).getpixel((0, 0)) == to_rgb(picture).getpixel((0, 0))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
def test_every_orientation_is_upright(kind: str) -> None:
    """The same pixels as PIL's own turning, and the header foresees their size."""
    for orientation in range(1, 9):
        content = _encoded(_corners(), kind, exif=_exif(orientation))
        expected = ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert("RGB")
        shown = read_image(_bytes(content))
        assert image_size(_bytes(content)) == shown.size == expected.size, orientation
        assert np.array_equal(np.asarray(shown), np.asarray(expected)), orientation


def test_an_orientation_behind_the_pixels_counts() -> None:
    """PNG files may hold their EXIF block at the end, where only decoding reaches it."""
    content = _encoded(_corners(), "PNG", exif=_exif(6))
    begin = content.index(b"eXIf") - 4
    block = content[begin : begin + int.from_bytes(content[begin : begin + 4], "big") + 12]
    without = content.replace(block, b"")
    end = without.index(b"IEND") - 4
    late = without[:end] + block + without[end:]
    assert image_size(_bytes(late)) == read_image(_bytes(late)).size == (16, 24)


def test_a_damaged_exif_block_costs_the_orientation_only() -> None:
    content = _encoded(_corners(), "WEBP", exif=_exif(6)).replace(b"MM\x00*", b"????").replace(b"II*\x00", b"????")
    assert image_size(_bytes(content)) == read_image(_bytes(content)).size == (24, 16)


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_the_first_frame_of_an_animation(kind: str) -> None:
    frames = [Image.new("RGB", (8, 6), colour) for colour in ("red", "blue")]
    content = _encoded(frames[0], kind, save_all=True, append_images=frames[1:])
    shown = read_image(_bytes(content))
    assert image_size(_bytes(content)) == shown.size == (8, 6)
    assert shown.getpixel((0, 0))[0] > 200 and shown.getpixel((0, 0))[2] < 60


def test_formats_with_several_sizes() -> None:
    """An icon file is as large as the picture that is decoded: its largest."""
    content = _encoded(Image.new("RGB", (64, 64)), "ICO", sizes=[(16, 16), (32, 32)])
    assert image_size(_bytes(content)) == read_image(_bytes(content)).size == (32, 32)


def test_looking_decodes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    contents = [_encoded(_corners(), kind) for kind in ("JPEG", "PNG", "GIF", "BMP")]

    def refuse(self: object) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", refuse)
    assert [image_size(_bytes(content)) for content in contents] == [(24, 16)] * 4
    with pytest.raises(BadSample):
        read_image(_bytes(contents[0]))


def test_limits_apply_only_when_given_and_keep_the_ratio() -> None:
    assert fit_size(400, 100, PixelLimits()) == (400, 100)
    assert fit_size(400, 100, PixelLimits(max_pixels=10_000)) == (200, 50)
    assert fit_size(400, 100, PixelLimits(max_pixels=200_000, min_pixels=160_000)) == (800, 200)
    assert fit_size(400, 100, PixelLimits(max_pixels=40_000, min_pixels=40_000)) == (400, 100)
    assert fit_size(400, 100, PixelLimits(max_pixels=1)) == (4, 1), "a side has a pixel at least"


def test_limits_hold_together_with_what_the_processor_accepts() -> None:
    limits = PixelLimits(max_pixels=1_000, factor=28, floor_pixels=3_136)
    assert fit_size(200, 200, limits) == (56, 56), "shrunk to what it would be enlarged to again"
    assert fit_size(56, 30, limits) == (56, 30), "legal sides are left to the processor"
    assert fit_size(56, 27, limits) == (81, 39)
    for sides in (
        (1, 1),
        (29, 27),
        (332, 27),
        (5_600, 28),
        (28, 5_599),
        (199, 39_799),
        (39_799, 199),
        (3, 600),
        (100, 20_000),
    ):
        for cap in (None, 900, 5_000, 100_000, 1_000_000):
            fitted = fit_size(*sides, PixelLimits(max_pixels=cap, factor=28, floor_pixels=3_136))
            assert fitted is not None and min(fitted) >= 28 and max(fitted) <= 200 * min(fitted), (sides, cap)
    assert fit_size(3, 27, PixelLimits(factor=28)) == (28, 252), "exactly, whatever 28/3 is in floating point"
    assert fit_size(201, 1, limits) is None
    assert fit_size(30, 10, PixelLimits(max_ratio=2.9)) is None


def test_a_resized_image_is_bicubic_and_a_fitting_one_untouched() -> None:
    noise = Image.effect_noise((64, 48), 90).convert("RGB")
    content = _encoded(noise, "PNG")
    assert np.array_equal(np.asarray(read_image(_bytes(content), (64, 48))), np.asarray(noise))
    assert np.array_equal(np.asarray(read_image(_bytes(content), (32, 20))), np.asarray(noise.resize((32, 20))))


def test_the_fast_decoder_gives_the_same_size_and_nearly_the_same_pixels() -> None:
    row, column = np.mgrid[:600, :800]
    smooth = np.stack([row * 255 // 600, column * 255 // 800, (row + column) * 255 // 1400], -1).astype(np.uint8)
    for orientation in (1, 6):
        content = _encoded(Image.fromarray(smooth), "JPEG", quality=95, exif=_exif(orientation))
        size = (200, 150) if orientation == 1 else (150, 200)
        plain, fast = (np.asarray(read_image(_bytes(content), size, fast=fast)) for fast in (False, True))
        assert fast.shape == plain.shape == (size[1], size[0], 3)
        assert 0 < np.abs(fast.astype(int) - plain).mean() < 1.5
        reduced = Image.open(io.BytesIO(content))
        reduced.draft(None, (200, 150))
        assert reduced.size == (200, 150)
        assert np.array_equal(fast, np.asarray(ImageOps.exif_transpose(reduced))), "one reduction, no second scaling"
        assert image_size(_bytes(content)) == ((800, 600) if orientation == 1 else (600, 800))


def test_undecodable_files_name_row_and_path(tmp_path: Path) -> None:
    whole_jpeg = _encoded(Image.effect_noise((64, 64), 90), "JPEG")
    whole_bmp = _encoded(_corners(), "BMP")
    for name, content, word in (
        ("cut.jpg", whole_jpeg[:700], "truncated"),
        ("empty.jpg", b"", "it is empty"),
        ("page.jpg", b"<html></html>", "<html>"),
        ("cut.bmp", whole_bmp[:-40], "truncated"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(BadSample) as raised:
            read_image(_file(tmp_path / name))
        assert ROW in str(raised.value) and str(tmp_path / name) in str(raised.value) and word in str(raised.value)
        assert raised.value.reason == "image can't be decoded"


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::PIL.Image.DecompressionBombWarning")
def test_a_picture_of_too_many_pixels_is_refused() -> None:
    """The limit is data.json's, whatever PIL's own is; it holds inside formats that say their size late, too."""
    content = _encoded(_corners(), "PNG")
    with pytest.raises(BadSample, match=r"24×16 = 384 pixels, and at most 200 are decoded") as raised:
        image_size(_bytes(content), most=200)
    assert raised.value.reason == "image too large"
    icon = b"\0\0\1\0\1\0" + bytes((8, 8, 0, 0, 1, 0, 32, 0)) + len(content).to_bytes(4, "little")
    icon += (22).to_bytes(4, "little") + content  # it calls itself 8×8
    with pytest.raises(BadSample, match=r"media_max_pixels in data\.json, now 100") as raised:
        read_image(_bytes(icon), most=100)
    assert raised.value.reason == "image too large"


def test_bytes_of_a_parquet_row() -> None:
    assert read_image(_bytes(_encoded(Image.new("RGB", (5, 4), "red"), "PNG"))).size == (5, 4)
    with pytest.raises(BadSample, match="the bytes of x"):
        read_image(_bytes(b"junk"))
