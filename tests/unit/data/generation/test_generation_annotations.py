"""Annotation files of every kind, and what is said of faulty rows."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.data.generation.annotations import Annotation, open_annotations, read_annotation
from mindspeed_mm.utils.errors import BadSample, DataError
from tests.unit.data.generation.generation_maker import config

ROWS: list[dict[str, Any]] = [
    {"path": "a.mp4", "cap": "first", "num_frames": 30, "fps": 24.0, "resolution": {"height": 48, "width": 80}},
    {"path": "b.mp4", "cap": ["second", "another"], "cut": [3, 20], "crop": [0, 40, 8, 48]},
]


def write(folder: Path, kind: str) -> Path:
    path = folder / f"rows.{kind}"
    if kind == "json":
        path.write_text(json.dumps(ROWS))
    elif kind == "jsonl":
        path.write_text("\n".join(json.dumps(row) for row in ROWS))
    elif kind == "csv":
        names = ["path", "cap", "num_frames", "fps", "resolution", "cut", "crop"]
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            for row in ROWS:
                writer.writerow({k: json.dumps(v) if isinstance(v, (list, dict)) else v for k, v in row.items()})
    else:
        import pyarrow as pa
        import pyarrow.parquet as parquet

        names = ["path", "num_frames", "fps", "resolution", "cut", "crop"]
        columns = {name: [row.get(name) for row in ROWS] for name in names}
        parquet.write_table(pa.table({**columns, "cap": [["first"], ROWS[1]["cap"]]}), path)
    return path


def read(path: Path, **basic: Any) -> list[Annotation]:
    parameters = config(
        path, **{f"basic_{name}": value for name, value in basic.items()}
    ).dataset_param.basic_parameters
    source = open_annotations(parameters, parameters.data_path)
    return [read_annotation(source.row(index), False, source.where(index)) for index in range(len(source))]


@pytest.mark.parametrize("kind", ["json", "jsonl", "csv", "parquet"])
def test_every_kind_of_file(tmp_path: Path, kind: str) -> None:
    first, second = read(write(tmp_path, kind))
    assert (first.ref.path, first.captions, first.ref.kind) == ("a.mp4", ("first",), "video")
    assert (first.frames, first.fps, first.height, first.width) == (30, 24.0, 48, 80) and first.is_complete
    assert (second.captions, second.cut, second.crop) == (("second", "another"), (3, 20), (0, 40, 8, 48))
    assert not second.is_complete


def test_combined_files(tmp_path: Path) -> None:
    write(tmp_path, "json")
    write(tmp_path, "csv")
    listed = tmp_path / "data.txt"
    listed.write_text("# media, annotation\n/media/one,rows.json\n\n /media/two , rows.csv \n")
    parameters = config(listed, basic_data_storage_mode="combine").dataset_param.basic_parameters
    source = open_annotations(parameters, parameters.data_path)
    assert len(source) == 4
    assert [source.folders(index)[0] for index in range(4)] == ["/media/one"] * 2 + ["/media/two"] * 2
    assert source.where(2).endswith("rows.csv, line 2 (row 1)")
    for text, message in (
        ("/media\n", r"data\.txt, line 1: .*expects `folder of media,annotation file`"),
        ("\n#", "no line"),
    ):
        listed.write_text(text)
        with pytest.raises(DataError, match=message):
            open_annotations(parameters, parameters.data_path)


def test_limits_hold_for_each_file(tmp_path: Path) -> None:
    assert len(read(write(tmp_path, "json"), max_samples=1)) == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"pat": "a.mp4", "cap": "x"},
            r"no column path or video or image or file_name; found pat.*; did you mean 'pat'\?",
        ),
        ({"path": "a.mp4"}, "no column cap or caption or text; found path"),
        ({"path": "", "cap": "x"}, "'path' is ''; expected a path"),
        ({"path": "a.mp4", "cap": 3}, "'cap' is '3'; expected text, or a list of texts"),
        ({"path": "a.mp4", "cap": []}, "'cap' is .*; expected text, or a list of texts"),
        ({"path": "a.mp4", "text": "x", "fps": "fast"}, "'fps' is 'fast'; expected a number above 0"),
        ({"path": "a.mp4", "text": "x", "cut": [5, 5]}, r"'cut' is .*; expected \[first frame, frame after the last\]"),
        ({"path": "a.mp4", "text": "x", "crop": [0, 5, 1]}, "'crop' is .*; expected a list of 4 numbers"),
        ({"path": "a.mp4", "text": "x", "crop": [9, 5, 0, 1]}, r"'crop' is .*; expected \[left, right, top, bottom\]"),
        ({"path": "a.mp4", "text": "x", "resolution": [1, 2]}, "'resolution' is .*; expected an object such as"),
    ],
)
def test_faulty_rows(row: dict[str, Any], message: str) -> None:
    with pytest.raises(BadSample, match=f"rows.json, row 3: {message}"):
        read_annotation(row, False, "rows.json, row 3")


def test_captions_that_look_like_lists() -> None:
    assert read_annotation({"path": "a", "cap": "[not a list] of texts"}, False, "x").captions == (
        "[not a list] of texts",
    )
    assert read_annotation({"path": "a", "cap": '["one", "two"]'}, False, "x").captions == ("one", "two")
    assert read_annotation({"path": "a", "cap": "[1, 2]"}, False, "x").captions == ("[1, 2]",)
    assert read_annotation({"path": "a.JPG", "cap": ""}, False, "x").ref.kind == "image"
