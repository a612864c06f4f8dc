"""Data files: shape taken from the content, one row at a time, errors with file and row."""

from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_mm.data import json_rows
from mindspeed_mm.data.files import JsonFile, ParquetFile, RowSource, locate_file, open_rows
from mindspeed_mm.utils.errors import DataError

ROWS = [{"a": 1, "t": 'quote " brace } slash \\'}, {"a": 2, "t": "图片"}, {"a": 3, "n": {"x": [1, {"y": "]"}]}}]


def _read(path: Path) -> list[dict]:
    file = open_rows(str(path))
    rows = [file.row(index) for index in range(len(file))]
    assert rows == list(file.head(len(rows)))  # both ways of reading agree
    return rows


SHAPES = {
    "array": json.dumps(ROWS),
    "array, pretty": json.dumps(ROWS, indent=2, ensure_ascii=False),
    "lines": "\n".join(map(json.dumps, ROWS)) + "\n",
    "lines, blank ones between and last": "\n\n".join(map(json.dumps, ROWS)) + "\n  \n\n",
    "pretty objects": "\n".join(json.dumps(row, indent=4, ensure_ascii=False) for row in ROWS) + "\n\n",
    "no last newline": "\n".join(map(json.dumps, ROWS)),
}


@pytest.mark.parametrize("suffix", ["json", "jsonl", "txt"])
@pytest.mark.parametrize("shape", SHAPES)
def test_shape_is_sniffed_whatever_the_suffix(tmp_path: Path, shape: str, suffix: str) -> None:
    """D07: an array saved as .jsonl, lines saved as .json, pretty-printed objects, blank last line."""
    path = tmp_path / f"rows.{suffix}"
    path.write_text(SHAPES[shape], encoding="utf-8")
    assert _read(path) == ROWS


@pytest.mark.parametrize("shape", SHAPES)
def test_byte_order_mark_and_crlf(tmp_path: Path, shape: str) -> None:
    """D08: UTF-8 with byte order mark and CRLF line ends, Chinese text; no stray CR in a value."""
    path = tmp_path / "rows.json"
    path.write_bytes(b"\xef\xbb\xbf" + SHAPES[shape].replace("\n", "\r\n").encode())
    assert _read(path) == ROWS


def test_reading_doesnt_depend_on_the_locale(tmp_path: Path) -> None:
    """D08: Chinese rows are read under LC_ALL=C."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS).encode())
    code = f"from mindspeed_mm.data.files import open_rows; print(ascii(open_rows({str(path)!r}).row(1)['t']))"
    env = {**os.environ, "LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert done.stdout.strip() == ascii("图片")


def test_bounds_agree_with_the_json_module_at_every_chunk_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    alphabet = ['"', "\\", "{", "}", "[", "]", ",", ":", "\n", "é", "图", "a", " "]
    rows = [
        {"k": "".join(rng.choices(alphabet, k=rng.randrange(12))), "n": [{"\\": "".join(rng.choices(alphabet, k=5))}]}
        for _ in range(60)
    ]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows, indent=1, ensure_ascii=False), encoding="utf-8")
    for size in (1, 2, 3, 7, 64, 1 << 20):
        monkeypatch.setattr(json_rows, "_CHUNK", size)
        assert _read(path) == rows, size


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["empty"]),
        (b"  \n\n", ["empty"]),
        (b"[]", ["no rows"]),
        (b'[{"a": 1}, {"a": 2', ["ends inside row 2", "cut off"]),
        (b'[{"a": 1}, {"a": 2}', ["ends inside row 3"]),
        (b'[{"a": 1} {"a": 2}]', ["before row 2", "comma"]),
        (b'[{"a": 1}, 5, {"a": 2}]', ["before row 2", ", 5,"]),
        (b'[{"a": 1}] {"a": 2}', ["after the array's end"]),
        (b"a,b\n1,2\n", ["expected JSON objects", "a,b"]),
        ("[]".encode("utf-16"), ["UTF-16", "UTF-8"]),
        (b"\x1f\x8b\x08\x00junk", ["gzip"]),
        (b"PAR1 not really", ["parquet", "can't be read"]),
    ],
)
def test_broken_files_say_what_was_found(tmp_path: Path, content: bytes, words: list[str]) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(content)
    with pytest.raises(DataError) as raised:
        RowSource([str(path)])
    assert str(path) in str(raised.value)
    for word in words:
        assert word in str(raised.value)


def test_broken_row_of_lines_names_its_line(tmp_path: Path) -> None:
    """D07: blank lines count as lines; the row before and after are read."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n\n{"a": 2,}\n{"a": 3}\n{"a": "\xff"}\n[1]\n')
    file = open_rows(str(path))
    assert [file.row(0), file.row(2)] == [{"a": 1}, {"a": 3}]
    for index, words in ((1, "line 3 (row 2)"), (3, "line 5 (row 4)"), (4, "line 6 (row 5)")):
        with pytest.raises(DataError, match=r"rows.jsonl") as raised:
            file.row(index)
        assert words in str(raised.value)
    assert "not UTF-8" in _message(lambda: file.row(3))
    assert "expected an object" in _message(lambda: file.row(4))


def test_first_line_broken_is_still_a_file_of_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": "cut\n{"a": 2}\n')
    assert "line 1 (row 1)" in _message(lambda: open_rows(str(path)).row(0))


def test_parquet_rows(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"m": [{"role": "user", "content": str(i)}], "images": None if i % 2 else ["x.png"]} for i in range(2500)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.json", row_group_size=700)
    file = open_rows(str(tmp_path / "rows.json"))
    assert isinstance(file, ParquetFile)
    assert len(file) == 2500
    assert [file.row(i) for i in (0, 699, 700, 2499)] == [rows[i] for i in (0, 699, 700, 2499)]
    assert list(file.head(1300)) == rows[:1300]
    assert pickle.loads(pickle.dumps(file)).row(5) == rows[5]


def test_json_file_is_compact_and_picklable(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"i": i, "t": "x" * 200}) + "\n" for i in range(20_000)))
    file = JsonFile(str(path))
    assert file.row(777)["i"] == 777
    data = pickle.dumps(file)
    assert len(data) < 20_000 * 16 + 2000  # two integers a row, none of the text
    assert pickle.loads(data).row(19_999)["i"] == 19_999


def test_several_files_in_order_with_a_limit_each(tmp_path: Path) -> None:
    """D15: max_samples is an upper bound, for each file."""
    for name, count in (("one.json", 3), ("two.jsonl", 5)):
        (tmp_path / name).write_text("\n".join(json.dumps({"f": name, "i": i}) for i in range(count)))
    paths = [str(tmp_path / name) for name in ("one.json", "two.jsonl")]
    source = RowSource(paths)
    assert [source.row(i)["i"] for i in range(len(source))] == [0, 1, 2, 0, 1, 2, 3, 4]
    assert len(RowSource(paths, limit=100_000)) == 8
    limited = RowSource(paths, limit=4)
    assert [limited.row(i)["f"] for i in range(len(limited))] == ["one.json"] * 3 + ["two.jsonl"] * 4
    assert limited.where(4).endswith("two.jsonl, line 2 (row 2)")


def test_data_files_are_looked_for_in_the_folder_then_as_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "train_rows.json").write_text("[]")
    (tmp_path / "here.json").write_text("[]")
    monkeypatch.chdir(tmp_path)
    assert locate_file("train_rows.json", "d") == "d/train_rows.json"
    assert locate_file("here.json", "d") == "here.json"
    message = _message(lambda: locate_file("train_row.json", "d"))
    assert "d/train_row.json" in message and "did you mean 'train_rows.json'" in message
    assert "folder" in _message(lambda: locate_file("d", "."))


def _message(call) -> str:
    with pytest.raises(DataError) as raised:
        call()
    return str(raised.value)
