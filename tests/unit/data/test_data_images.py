"""Images of every mode, upright and RGB; paths that don't depend on the working folder."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mindspeed_mm.data.images import load_image, locate_image, to_rgb
from mindspeed_mm.data.records import ImageRef
from mindspeed_mm.utils.errors import DataError


def _load(path: Path, **limits: int) -> Image.Image:
    return load_image(ImageRef(path.name), str(path), "rows.json, row 3", **limits)


def test_paths_are_resolved_against_the_media_root_then_the_data_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D13: the same file from every working folder; a missing one names row and full path."""
    root, beside = tmp_path / "root", tmp_path / "data"
    for folder in (root / "sub", beside, tmp_path / "elsewhere"):
        folder.mkdir(parents=True)
    (root / "sub" / "a.png").write_bytes(b"")
    (beside / "b.png").write_bytes(b"")
    for here in (tmp_path, tmp_path / "elsewhere"):
        monkeypatch.chdir(here)
        for name, place in (("sub/a.png", root), ("b.png", beside), (str(beside / "b.png"), beside)):
            found = locate_image(ImageRef(name), str(root), str(beside), "row")
            assert found == str(place / name)
    with pytest.raises(DataError) as raised:
        locate_image(ImageRef("c.png"), str(root), str(beside), "rows.json, row 3")
    for word in ("rows.json, row 3", str(root / "c.png"), str(beside / "c.png")):
        assert word in str(raised.value)


def test_every_mode_becomes_rgb_over_white(tmp_path: Path) -> None:
    """I04: transparent areas are white; palettes, grey and 16-bit grey keep their tones."""
    clear = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    half = Image.new("RGBA", (4, 4), (255, 0, 0, 128))
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([0, 0, 0, 10, 20, 30])
    holed = palette.copy()
    holed.info["transparency"] = 1
    grey16 = Image.fromarray(np.full((4, 4), 32896, dtype=np.uint16))
    expected = [
        (clear, (255, 255, 255)), (half, (255, 127, 127)), (Image.new("LA", (4, 4), (0, 0)), (255, 255, 255)),
        (palette, (10, 20, 30)), (holed, (255, 255, 255)), (Image.new("L", (4, 4), 77), (77, 77, 77)),
        (Image.new("1", (4, 4), 1), (255, 255, 255)), (Image.new("CMYK", (4, 4), (0, 0, 0, 0)), (255, 255, 255)),
        (grey16, (128, 128, 128)),
    ]  # fmt: skip
    for number, (picture, colour) in enumerate(expected):
        shown = to_rgb(picture)
        assert (shown.mode, shown.getpixel((1, 1))) == ("RGB", colour), number
    for number, picture in enumerate((clear, holed, grey16)):
        picture.save(tmp_path / f"{number}.png")
        assert _load(tmp_path / f"{number}.png").getpixel((0, 0)) == to_rgb(picture).getpixel((0, 0))


def test_exif_orientation_and_first_frame(tmp_path: Path) -> None:
    """I07: a 24×16 JPEG with orientation 6 reaches the processor as 16×24."""
    picture = Image.new("RGB", (24, 16), "white")
    exif = picture.getexif()
    exif[0x0112] = 6
    picture.save(tmp_path / "turned.jpg", exif=exif)
    assert _load(tmp_path / "turned.jpg").size == (16, 24)
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "two.gif", save_all=True, append_images=frames[1:])
    assert _load(tmp_path / "two.gif").getpixel((0, 0))[0] > 200


def test_limits_apply_only_when_given_and_keep_the_ratio(tmp_path: Path) -> None:
    Image.new("RGB", (400, 100)).save(tmp_path / "wide.png")
    assert _load(tmp_path / "wide.png").size == (400, 100)
    assert _load(tmp_path / "wide.png", max_pixels=10_000).size == (200, 50)
    assert _load(tmp_path / "wide.png", min_pixels=160_000, max_pixels=200_000).size == (800, 200)
    assert _load(tmp_path / "wide.png", max_pixels=40_000, min_pixels=40_000).size == (400, 100)
    assert _load(tmp_path / "wide.png", max_pixels=1).size == (2, 1)


def test_undecodable_files_name_row_and_path(tmp_path: Path) -> None:
    """I08: cut in half, empty, HTML; never half-grey data."""
    buffer = io.BytesIO()
    Image.effect_noise((64, 64), 90).save(buffer, "JPEG")
    for name, content in (("cut.jpg", buffer.getvalue()[:700]), ("empty.jpg", b""), ("page.jpg", b"<html></html>")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError) as raised:
            _load(tmp_path / name)
        assert "rows.json, row 3" in str(raised.value) and str(tmp_path / name) in str(raised.value)


def test_bytes_of_a_parquet_row() -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (5, 4), "red").save(buffer, "PNG")
    assert load_image(ImageRef("x", buffer.getvalue()), "", "row").size == (5, 4)
    with pytest.raises(DataError, match="the bytes of x"):
        load_image(ImageRef("x", b"junk"), "", "row")
