"""Data files: shape taken from the content, one row at a time, errors with file and row."""

from __future__ import annotations

import array
import json
import multiprocessing
import os
import pickle
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.data.sources import json_rows, text_rows
from mindspeed_mm.data.sources.files import DataEntry, RowSource
from mindspeed_mm.data.sources.row_files import JsonFile, open_rows
from mindspeed_mm.data.sources.table_files import ArrowFile, ParquetFile
from mindspeed_mm.data.sources.text_rows import TextFile
from mindspeed_mm.utils.errors import BadSample, DataError

ROWS = [{"a": 1, "t": 'quote " brace } slash \\'}, {"a": 2, "t": "图片"}, {"a": 3, "n": {"x": [1, {"y": "]"}]}}]


def _source(*paths: object, max_rows: int | None = None, lazy: bool = False, **options: Any) -> RowSource:
    return RowSource([DataEntry(str(path), (str(path),), max_rows=max_rows) for path in paths], lazy=lazy, **options)


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
    code = f"from mindspeed_mm.data.sources.files import open_rows; print(ascii(open_rows({str(path)!r}).row(1)['t']))"
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


def test_lines_are_found_at_every_chunk_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines longer than a chunk, blank ones, a last one without a break."""
    rows = [{"t": "x" * length} for length in (0, 5, 300, 1, 70)]
    path = tmp_path / "rows.jsonl"
    for end in ("", "\n", "\n\n"):
        path.write_text("\n\n".join(map(json.dumps, rows)) + end)
        for size in (1, 2, 7, 64, 1 << 20):
            monkeypatch.setattr(json_rows, "_CHUNK", size)
            assert _read(path) == rows, (end, size)


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
        (b"<html>\n<body>\n", ["expected JSON objects", "csv", "<html>"]),
        (b"a,a\n1,2\n", ["expected JSON objects", "a,a"]),
        (b"a,b\n", ["no rows"]),
        (b"\x00\x01\x02\n", ["expected json", "x00"]),
        (b"ARROW1 not really", ["arrow", "can't be read"]),
        ("[]".encode("utf-16"), ["UTF-16", "UTF-8"]),
        (b"\x1f\x8b\x08\x00junk", ["gzip"]),
        (b"PAR1 not really", ["parquet", "can't be read"]),
    ],
)
def test_broken_files_say_what_was_found(tmp_path: Path, content: bytes, words: list[str]) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(content)
    with pytest.raises(DataError) as raised:
        len(_source(path))
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
    """D15: max_samples is an upper bound, for each data set."""
    for name, count in (("one.json", 3), ("two.jsonl", 5)):
        (tmp_path / name).write_text("\n".join(json.dumps({"f": name, "i": i}) for i in range(count)))
    paths = [str(tmp_path / name) for name in ("one.json", "two.jsonl")]
    source = _source(*paths)
    assert [source.row(i)["i"] for i in range(len(source))] == [0, 1, 2, 0, 1, 2, 3, 4]
    assert len(_source(*paths, max_rows=100_000)) == 8
    limited = _source(*paths, max_rows=4)
    assert [limited.row(i)["f"] for i in range(len(limited))] == ["one.json"] * 3 + ["two.jsonl"] * 4
    assert limited.where(4).endswith("two.jsonl, line 2 (row 2)")
    for lazy in (False, True):  # one data set of two files
        both = RowSource([DataEntry("both", tuple(paths), max_rows=4)], lazy=lazy)
        assert [both.row(i)["f"] for i in range(4)] == ["one.json"] * 3 + ["two.jsonl"]
        with pytest.raises(IndexError):
            both.row(4)


CSV = 'prompt,images,note\n"say ""hi"",\nplease","[""a.png""]",x\n图片,,5" pipe\n\n"last",[],\n'
CSV_ROWS = [
    {"prompt": 'say "hi",\nplease', "images": '["a.png"]', "note": "x"},
    {"prompt": "图片", "images": "", "note": '5" pipe'},
    {"prompt": "last", "images": "[]", "note": ""},
]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_csv(tmp_path: Path, delimiter: str, mark: bytes, end: str) -> None:
    """D08: quoted line breaks, quotes in a field, blank lines, byte order mark, CRLF, three delimiters."""
    path = tmp_path / "rows.json"
    text = CSV if delimiter == "," else CSV.replace('"",', '""#').replace(",", delimiter).replace('""#', '"",')
    path.write_bytes(mark + text.replace("\n", end).encode())
    rows = [{key: value.replace("\n", end) for key, value in row.items()} for row in CSV_ROWS]
    assert _read(path) == rows


def test_csv_rows_are_found_in_batches_and_faults_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mindspeed_mm.data.sources import csv_file

    path = tmp_path / "rows.csv"
    path.write_text("text\n" + "".join(f'"row\n{i}"\n' for i in range(10)))
    for size in (1, 3, 100):
        monkeypatch.setattr(csv_file, "_BATCH", size)
        assert _read(path) == [{"text": f"row\n{i}"} for i in range(10)]
    path.write_bytes(b"a,b\n1,2\n1,2,3\n\xff,1\n")
    assert "line 3 (row 2): expected 2 fields (a, b), found 3" in _message(lambda: open_rows(str(path)).row(1))
    assert "line 4 (row 3): not UTF-8" in _message(lambda: open_rows(str(path)).row(2))
    assert [isinstance(row, BadSample) for row in open_rows(str(path)).head(9)] == [False, True, True]


@pytest.mark.parametrize("form", ["file", "stream", "compressed file"])
def test_arrow(tmp_path: Path, form: str) -> None:
    import pyarrow as pa

    rows = [{"m": [{"role": "user", "content": str(i)}], "images": None if i % 2 else ["x.png"]} for i in range(2500)]
    table = pa.Table.from_pylist(rows)
    options = pa.ipc.IpcWriteOptions(compression="zstd" if "compressed" in form else None)
    new = pa.ipc.new_stream if form == "stream" else pa.ipc.new_file
    with new(str(tmp_path / "rows.json"), table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=700)
    file = open_rows(str(tmp_path / "rows.json"))
    assert isinstance(file, ArrowFile) and len(file) == 2500
    assert [file.row(i) for i in (0, 699, 700, 2499)] == [rows[i] for i in (0, 699, 700, 2499)]
    assert list(file.head(1300)) == rows[:1300]
    assert pickle.loads(pickle.dumps(file)).row(5) == rows[5]
    assert not file.has(2500)


def test_parquet_holds_few_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from mindspeed_mm.data.sources import table_files

    rows = [{"i": i, "text": f"{i} " * 50} for i in range(5000)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=100)
    file = open_rows(str(tmp_path / "rows.parquet"))
    monkeypatch.setattr(table_files, "CACHED_BYTES", 3 * file._bytes[0])
    order = random.Random(0).sample(range(5000), 300)
    assert [file.row(i)["i"] for i in order] == order
    assert 1 <= len(file._cached) <= 3
    assert list(file.head(5000)) == rows and len(file._cached) <= 3


def _child_reads(file: Any, index: int) -> Any:
    """Row `index` as a forked child sees it."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.write(write, str(file.row(index)["i"]).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as pipe:
        return int(pipe.read())


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv"])
def test_the_processes_of_a_node_search_a_file_once(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both at the same time; the places of its rows are mapped into both, and go with the last of them."""
    rows = [{"i": i} for i in range(3000)]
    path = tmp_path / f"rows.{kind}"
    if kind == "csv":
        path.write_text("i\n" + "".join(f"{row['i']}\n" for row in rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows) if kind == "jsonl" else json.dumps(rows))
    write = TextFile._write_bounds

    def slowly(file: TextFile, working: Path) -> None:
        with open(tmp_path / "noted", "a") as noted:
            noted.write("searched\n")
        time.sleep(0.3)
        write(file, working)

    def read(seen: Path) -> None:
        file = open_rows(str(path))
        count = len(file)
        seen.write_text(json.dumps([count, int(file.row(2999)["i"]), pickle.loads(pickle.dumps(file)).row(7)]))

    monkeypatch.setattr(text_rows, "_SHARED_BYTES", 0)
    monkeypatch.setattr(TextFile, "_write_bounds", slowly)
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=read, args=(tmp_path / f"seen{number}",)) for number in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    expected = [3000, 2999, {"i": "7" if kind == "csv" else 7}]
    assert [json.loads((tmp_path / f"seen{number}").read_text()) for number in range(2)] == [expected] * 2
    assert (tmp_path / "noted").read_text() == "searched\n"
    file = open_rows(str(path))
    assert len(file) == 3000 and not any(isinstance(bound, array.array) for bound in (file._starts, file._ends))
    folder = file._folder.path
    assert folder.exists()
    file._folder.close()
    assert not folder.exists() and file.row(5) == ({"i": "5"} if kind == "csv" else {"i": 5})


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "arrow"])
def test_forked_workers_read_for_themselves(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search or a file that the parent has begun with is not disturbed by a child that goes on with it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    monkeypatch.setattr(json_rows, "_CHUNK", 256)
    rows = [{"i": i} for i in range(9000)]
    path = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "csv":
        path.write_text("i\n" + "".join(f"{row['i']}\n" for row in rows))
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=1000)
    else:
        with pa.ipc.new_file(str(path), pa.schema({"i": pa.int64()})) as writer:
            writer.write_table(pa.Table.from_pylist(rows), max_chunksize=1000)
    source = _source(path, lazy=True)
    source.row(10)
    assert _child_reads(source, 8000) == 8000
    assert _child_reads(pickle.loads(pickle.dumps(source)), 7000) == 7000
    assert [int(source.row(i)["i"]) for i in range(9000)] == list(range(9000))


def test_lazy_rows_are_found_as_far_as_they_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_rows, "_CHUNK", 1000)
    for name, count in (("one.jsonl", 500), ("two.jsonl", 300)):
        (tmp_path / name).write_text("".join(json.dumps({"f": name, "i": i}) + "\n" for i in range(count)))
    paths = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    source = _source(*paths, lazy=True)
    assert source.row(100)["i"] == 100 and source.known_length is None
    assert 100 < len(source.files[0]._starts) < 200 and not len(source.files[1]._starts)
    with pytest.raises(TypeError):
        len(source)
    assert (source.row(500)["f"], source.where(501)) == ("two.jsonl", f"{paths[1]}, line 2 (row 2)")
    assert source.known_length is None
    with pytest.raises(IndexError):
        source.row(800)
    assert source.known_length == 800 and source.row(799)["i"] == 299
    limited = _source(*paths, lazy=True, max_rows=200)
    assert [limited.row(i)["f"] for i in (199, 200)] == ["one.jsonl", "two.jsonl"]
    with pytest.raises(IndexError):
        limited.row(400)
    assert limited.known_length == 400
    array = tmp_path / "array.json"
    array.write_text(json.dumps([{"i": i} for i in range(5)]))
    assert [_source(array, lazy=True).row(i)["i"] for i in range(5)] == list(range(5))
    (tmp_path / "empty.csv").write_text("a,b\n")
    assert "no rows" in _message(lambda: _source(tmp_path / "empty.csv", lazy=True))


def test_where_media_are_looked_for(tmp_path: Path) -> None:
    """D13: the data set's own root, then beside the file, then as written."""
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n')
    entry = DataEntry("x", (str(tmp_path / "rows.jsonl"),), media_dir="media")
    for lazy in (False, True):
        assert RowSource([entry], lazy=lazy).folders(0) == ("media", str(tmp_path), "")


def _message(call) -> str:
    with pytest.raises(DataError) as raised:
        call()
    return str(raised.value)
