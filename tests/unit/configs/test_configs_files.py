"""Reading JSON and YAML: encodings, numbers, and faults with their place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.configs.files import read_json, read_yaml
from mindspeed_mm.utils.errors import ConfigError


def written(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_byte_order_mark_line_ends_and_chinese(tmp_path: Path) -> None:
    path = written(tmp_path, "a.json", '\ufeff{"a": "图片",\r\n "b": 1}\r\n'.encode())
    assert read_json(path) == {"a": "图片", "b": 1}
    path = written(tmp_path, "a.yaml", "\ufeffa: 图片\r\nb: 1\r\n".encode())
    assert read_yaml(path) == {"a": "图片", "b": 1}


@pytest.mark.parametrize("name, reader", [("a.json", read_json), ("a.yaml", read_yaml)])
def test_not_utf8(tmp_path: Path, name: str, reader: Any) -> None:
    path = written(tmp_path, name, b'{"a": 1,\n"b": "' + "中文".encode("gbk") + b'"}')
    with pytest.raises(ConfigError, match=rf"{name}, line 2: not UTF-8"):
        reader(path)


@pytest.mark.parametrize(
    "text, parts",
    [
        ('{"a": 1,\n "b": 2,}', ["line 2", "column", "not JSON"]),
        ('{"a": 1', ["line 1", "not JSON"]),
        ("{'a': 1}", ["line 1", "column 2"]),
        ('{"a": 1} x', ["line 1", "column 10"]),
        ('{"a": 1,\n "b": {"c": 1,\n "c": 2}}', ["key 'c' is written twice", "lines 2, 3"]),
        ('{"a": NaN}', ["NaN", "not a JSON value"]),
        ("  \n", ["is empty"]),
    ],
)
def test_json_faults(tmp_path: Path, text: str, parts: list[str]) -> None:
    path = written(tmp_path, "model.json", text)
    with pytest.raises(ConfigError) as caught:
        read_json(path)
    for part in [str(path), *parts]:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "text, parts",
    [
        ("a: 1\nb: [1, 2\n", ["line 3", "flow sequence"]),
        ("a: 1\n b: 2\n", ["line 2", "mapping values are not allowed"]),
        ("a: 1\n\tb: 2\n", ["line 2", "'\\t'"]),
        ("a: 1\nb:\n  c: 1\n  c: 2\n", ["line 4", "'c' is written twice", "first in line 3"]),
        ("a: !!python/object/apply:os.system ['true']\n", ["line 1", "python/object"]),
        ("? [1]\n: 2\n", ["line 1", "a key must be text"]),
        ("a: *nothing\n", ["line 1", "undefined alias"]),
    ],
)
def test_yaml_faults(tmp_path: Path, text: str, parts: list[str]) -> None:
    path = written(tmp_path, "fsdp2.yaml", text)
    with pytest.raises(ConfigError) as caught:
        read_yaml(path)
    for part in [str(path), *parts]:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "text, value",
    [
        ("1e-5", 1e-5),
        ("1E5", 1e5),
        ("1e-08", 1e-8),
        ("1.5e+2", 150.0),
        ("-3", -3),
        ("0", 0),
        (".5", 0.5),
        ("2.", 2.0),
        ("010", "010"),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("2024-01-01", "2024-01-01"),
        ("1e", "1e"),
        ("None", "None"),
        ("~", None),
        ("null", None),
        ("yes", True),
        ("'False'", "False"),
        ("auto\t", "auto"),
        ("model.layers.{*}", "model.layers.{*}"),
        ("model.layers.{0-3,5}.mlp", "model.layers.{0-3,5}.mlp"),
    ],
)
def test_yaml_values(tmp_path: Path, text: str, value: Any) -> None:
    read = read_yaml(written(tmp_path, "a.yaml", f"a: {text}\n"))["a"]
    assert read == value and type(read) is type(value)


def test_yaml_anchors_and_merge_keys(tmp_path: Path) -> None:
    text = "base: &base\n  x: 1\n  y: 2\nuse:\n  <<: *base\n  y: 3\n"
    assert read_yaml(written(tmp_path, "a.yaml", text))["use"] == {"x": 1, "y": 3}


def test_empty_yaml_is_none(tmp_path: Path) -> None:
    assert read_yaml(written(tmp_path, "a.yaml", "# nothing\n")) is None


def test_missing_files_name_what_is_there(tmp_path: Path) -> None:
    written(tmp_path, "model.json", "{}")
    with pytest.raises(ConfigError, match=r"modell\.json does not exist; did you mean '.*model\.json'"):
        read_json(tmp_path / "modell.json")
    (tmp_path / "config").mkdir()
    with pytest.raises(ConfigError, match=r"there is no '.*/configs'; '.*' holds 'config'"):
        read_json(tmp_path / "configs" / "deep" / "model.json")
    with pytest.raises(ConfigError, match="is a directory; expected a file"):
        read_yaml(tmp_path / "config")
