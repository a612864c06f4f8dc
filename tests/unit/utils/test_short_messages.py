"""Every message cuts what it quotes: a value of a megabyte at any door leaves a message that a person can read."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from mindspeed_mm.configs.config import MMConfig
from mindspeed_mm.configs.data_config import DataConfig
from mindspeed_mm.configs.files import read_json, read_yaml
from mindspeed_mm.configs.flags.parser import reader
from mindspeed_mm.configs.hf_directory import read_hf_config
from mindspeed_mm.configs.model_config import TransformersModelConfig, check_local_path
from mindspeed_mm.configs.sections import raise_all
from mindspeed_mm.configs.sora_config import SoRAModelConfig
from mindspeed_mm.data.adapter import check_model_path
from mindspeed_mm.data.conversation.contents import _named
from mindspeed_mm.data.conversation.messages import RowFault, short_repr
from mindspeed_mm.data.generation.annotations import read_annotation
from mindspeed_mm.data.media.media import MediaRef
from mindspeed_mm.data.media.media_files import find_media
from mindspeed_mm.utils.errors import ConfigError, MMError
from mindspeed_mm.utils.text import shorten

LONG = "x/y" * 350_000
HF = {"init_from_hf_path": "."}


def written(folder: Path, text: str, name: str = "f.json") -> Path:
    (folder / name).write_text(text)
    return folder / name


DOORS: dict[str, Callable[[Path], Any]] = {
    "a value": lambda f: TransformersModelConfig.from_dict({**HF, "train_from_scratch": LONG}),
    "a key": lambda f: TransformersModelConfig.from_dict({**HF, LONG: 1}),
    "a key of a data set": lambda f: DataConfig.from_dict({"dataset_param": {LONG: LONG}}),
    "a part": lambda f: SoRAModelConfig.from_dict({"predictor": {"model_id": "wan", "dtype": LONG}}),
    "a path of a model": lambda f: raise_all(check_local_path("model.json", "init_from_hf_path", LONG)),
    "a path of a processor": lambda f: check_model_path(LONG),
    "a path of a file": lambda f: MMConfig({"model": f"{LONG}.json"}),
    "JSON that is broken": lambda f: read_json(written(f, '{"a": "' + LONG + '" 3}')),
    "a key written twice": lambda f: read_json(written(f, '{"%s": 1, "%s": 2}' % ((LONG[:50_000],) * 2))),
    "YAML that is broken": lambda f: read_yaml(written(f, f"a: [{LONG}\nb: }}", "f.yaml")),
    "a model_type": lambda f: read_hf_config(written(f, json.dumps({"model_type": LONG}), "config.json").parent, "m"),
    "a column": lambda f: read_annotation({LONG: 1}, False, "row 1"),
    "a path of a medium": lambda f: find_media(MediaRef("image", LONG), [str(f), LONG], "row 1"),
    "whatever an error of another library quotes": lambda f: raise_all([f"can't be read: {LONG}; fetch it again"]),
}


@pytest.mark.parametrize("door", DOORS)
def test_a_megabyte_leaves_a_short_message(door: str, tmp_path: Path) -> None:
    with pytest.raises(MMError) as refused:
        DOORS[door](tmp_path)
    assert len(str(refused.value)) < 2000


def test_a_flags_word() -> None:
    item = SimpleNamespace(kind=int, optional=False, path=None, synonyms=(), words=(), choices=None)
    with pytest.raises(Exception, match="expected a whole number") as refused:
        reader(item)(LONG)  # type: ignore[arg-type]
    assert len(str(refused.value)) < 200


def test_what_is_cut_keeps_both_ends() -> None:
    assert shorten("short") == "short"
    cut = shorten("begin" + LONG + "end", 100)
    assert len(cut) == 100 and cut.startswith("begin") and cut.endswith("end") and "[1,050,008 characters]" in cut
    assert len(short_repr(LONG)) <= 120
    error = ConfigError(f"model.json: first {LONG}\nmodel.json: second")
    assert str(error).startswith("model.json: first") and str(error).endswith("\nmodel.json: second")


def test_w10_a_picture_in_base64_without_data_before_it() -> None:
    """W10: it is read; what is too long for a path and is no base64 is a short message."""
    opened = io.BytesIO()
    Image.new("RGB", (40, 40), (200, 10, 10)).save(opened, "PNG")
    text = base64.b64encode(opened.getvalue()).decode()
    assert _named(text, "image").content == opened.getvalue()
    assert _named("/9j/pictures/of/a/long/folder/name/that/is/a/path/all/the/same/really.jpg", "image").content is None
    with pytest.raises(RowFault) as refused:
        _named("?" * 600_000, "image")
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    ("row", "word"), [({"path": "a.mp4", "cap": None}, "'cap' is null"), ({"path": None}, "'path' is null")]
)
def test_w11_a_caption_that_is_null(row: dict[str, Any], word: str) -> None:
    """W11: it is said to be null, and not looked for among the columns that are there."""
    with pytest.raises(MMError) as refused:
        read_annotation(row, False, "row 1")
    assert word in str(refused.value) and "did you mean" not in str(refused.value)
