"""`mindspeed-mm data convert`: training reads the new rows as it reads the rows that they were made of."""

from __future__ import annotations

import base64
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from PIL import Image

from mindspeed_mm.configs.generation_data import GenerationBasicParameters
from mindspeed_mm.data import build_mm_dataset
from mindspeed_mm.data.generation.annotations import open_annotations, read_annotation
from mindspeed_mm.data.places import Place
from mindspeed_mm.data.sources.splitting import split_rows
from mindspeed_mm.tools.cli import main
from tests.support.tiny import tiny_qwen2_5_vl_dir
from tests.unit.data.data_rows import FORMS, talk

#: rows that the common forms don't have: tags as text, typed parts, media in answers, clips of pictures, flags
UNUSUAL: list[dict[str, Any]] = [
    talk([{"type": "text", "text": "is <image> a tag?"}, {"type": "image"}], "yes", images=["a.png"]),
    talk("<image> and <image>", "two", images=["a.png", "b.png"]),
    talk([{"type": "image", "image": "a.png"}, {"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
    talk("draw a seven", "<image>", images=["a.png"]),
    talk([{"type": "text", "text": "is <image> a tag?"}], [{"type": "image"}], images=["a.png"]),
    talk("<image> is a tag without images", "yes"),
    talk("<video>what happens", "much", videos=[["a.png", "b.png"]], fps=2),
    talk("<video>what happens", "much", videos=[{"frames": ["a.png", "b.png", "a.png", "b.png"], "fps": 4}]),
    talk("one", "two", "three", "four", system="brief"),
    {"messages": [*talk("one", "two")["messages"][:1], {"role": "assistant", "content": "two", "loss": 0},
                  *talk("three", "four")["messages"]]},
    talk("half of a pair: \ud83d", "\udc00"),
    {"messages": [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "look", "arguments": {"x": 1}}]},
        {"role": "tool", "content": "<image>", "name": "look"}, {"role": "assistant", "content": "seven"}],
     "tools": [{"type": "function", "function": {"name": "look", "parameters": {"x": None, "y": 1}}}],
     "images": ["a.png"]},
]  # fmt: skip


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A folder with pictures of different sizes, where the tests' rows are too."""
    for name, size, colour in (("a.png", (28, 28), "red"), ("b.png", (84, 56), "green"), ("c.jpg", (40, 120), "blue")):
        Image.new("RGB", size, colour).save(tmp_path / name)
    return tmp_path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen2_5_vl_dir(tmp_path_factory.mktemp("model"), weights=False)


def write_rows(folder: Path, rows: list[dict[str, Any]], name: str = "rows.json") -> str:
    path = folder / name
    path.write_text(json.dumps(rows), encoding="utf-8")
    return str(path)


def convert(*words: object) -> int:
    return main(["data", "convert", *map(str, words)])


def samples(model: Path, dataset: str, folder: str, attr: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """The tensors that training makes of rows, in their order."""
    opened = build_mm_dataset(
        {
            "dataset_type": "huggingface",
            "basic_parameters": {"dataset": dataset, "dataset_dir": folder},
            "preprocess_parameters": {"model_name_or_path": str(model)},
            **({"attr": attr} if attr else {}),
        }
    )
    return [opened[index] for index in range(len(opened))]


def assert_same_samples(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        assert (other["labels"] != -100).any()
        assert all(np.array_equal(np.asarray(one[key]), np.asarray(other[key])) for key in one)


@pytest.mark.parametrize(
    ("form", "media"),
    [
        *((form, "relative") for form in FORMS),
        *(pytest.param(form, "copy", marks=pytest.mark.full) for form in FORMS),
        ("unusual", "relative"),
        ("unusual", "copy"),
    ],
)
def test_new_rows_are_the_samples_of_the_old_ones(
    form: str, media: str, model: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids, labels and pixels, in each format of files, from whatever folder they are read."""
    make, attr = FORMS.get(form, (UNUSUAL.__getitem__, {}))
    rows = [make(n) for n in range(6 if form in FORMS else len(UNUSUAL))]
    source = write_rows(pictures, rows)
    expected = samples(model, source, str(pictures), attr)
    monkeypatch.chdir(model)
    for kind in ("jsonl", "json", "parquet"):
        output = pictures / kind / "new"
        assert convert(source, "--output", output, "--to", kind, "--media", media) == 0
        if media == "copy":
            os.rename(output, pictures / f"{kind}-moved")
            output = pictures / f"{kind}-moved"
        assert_same_samples(samples(model, f"train.{kind}", str(output)), expected)


@pytest.mark.parametrize(
    ("stated", "row"),
    [
        ("llava", FORMS["llava"][0](1)),
        ("sharegpt", FORMS["sharegpt_with_calls"][0](1)),
        ("messages", FORMS["messages"][0](1)),
        ("alpaca", FORMS["alpaca"][0](1)),
        ("query", FORMS["query_response"][0](1)),
    ],
)
def test_a_stated_form_is_read_beside_another(stated: str, row: dict[str, Any], model: Path, pictures: Path) -> None:
    """Rows that have the columns of two forms."""
    other = {"query": "x", "response": "y"} if stated != "query" else {"instruction": "x", "output": "y"}
    expected = samples(model, write_rows(pictures, [row], "one.json"), str(pictures))
    source = write_rows(pictures, [{**other, **row}])
    assert convert(source, "--output", pictures / "new", "--from", stated) == 0
    assert_same_samples(samples(model, "train.jsonl", str(pictures / "new")), expected)


def test_media_of_later_rows_are_read(model: Path, pictures: Path) -> None:
    """A column that only a row beyond the recognised ones has; training refuses the old file for it."""
    rows = [talk(f"which {n}", "seven") for n in range(1001)] + [talk("<image>", "seven", images=["a.png"])]
    source = write_rows(pictures, rows)
    attr = FORMS["messages"][1]
    description = {
        "dataset_param": {
            "dataset_type": "huggingface",
            "basic_parameters": {"dataset": source, "dataset_dir": str(pictures)},
            "preprocess_parameters": {"model_name_or_path": str(model)},
            "attr": attr,
        }
    }
    (pictures / "data.json").write_text(json.dumps(description))
    assert convert(pictures / "data.json", "--output", pictures / "new") == 0
    assert_same_samples(
        samples(model, "train.jsonl", str(pictures / "new"))[-1:], samples(model, source, "", attr)[-1:]
    )


def test_bytes_become_files(model: Path, pictures: Path) -> None:
    """Pictures in a table, and in a text as base64."""
    content = (pictures / "c.jpg").read_bytes()
    rows = [
        talk("<image>which", "seven", images=[{"bytes": content, "path": None}]),
        talk("<image>which", "eight", images=[{"bytes": content, "path": "c.jpg"}]),
        talk("<image>which", "nine", images=[{"bytes": (pictures / "a.png").read_bytes(), "path": None}]),
    ]
    parquet.write_table(pa.Table.from_pylist(rows), pictures / "rows.parquet")
    assert convert(pictures / "rows.parquet", "--output", pictures / "new", "--media", "keep") == 0
    assert Counter(path.suffix for path in (pictures / "new/media").iterdir()) == {".jpg": 1, ".png": 1}
    expected = samples(model, "rows.parquet", str(pictures))
    assert_same_samples(samples(model, "train.jsonl", str(pictures / "new")), expected)
    uri = "data:image/jpeg;base64," + base64.b64encode(content).decode()
    source = write_rows(pictures, [talk("<image>which", "seven", images=[uri])])
    assert convert(source, "--output", pictures / "again") == 0
    assert_same_samples(samples(model, "train.jsonl", str(pictures / "again")), expected[:1])


def annotations_of(path: Path) -> list[Any]:
    """What training of generation models reads of an annotation file."""
    source = open_annotations(GenerationBasicParameters(data_path=[str(path)]), [str(path)])
    return [read_annotation(source.row(n), False, Place(source, n)) for n in range(len(source))]


def test_captions_keep_all_that_is_said_of_clips(pictures: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"path": "a.png", "cap": ["one", "two"], "resolution": {"height": 28, "width": 28}},
        {"image": "b.png", "caption": '["a list in a text"]'},
        {"path": "clip.mp4", "text": "three", "num_frames": 9, "fps": 24.5, "cut": [1, 8], "crop": [0, 4, 0, 4]},
    ]
    (pictures / "clip.mp4").write_bytes(b"clip")
    source = Path(write_rows(pictures, rows))
    for kind in ("jsonl", "json", "parquet"):
        output = pictures / "new" / kind
        assert convert(source, "--output", output, "--to", kind) == 0
        found, expected = annotations_of(output / f"train.{kind}"), annotations_of(source)
        assert [(note.captions, note.frames, note.fps, note.height, note.cut, note.crop) for note in found] == [
            (note.captions, note.frames, note.fps, note.height, note.cut, note.crop) for note in expected
        ]
        assert [os.path.realpath(output / note.ref.path) for note in found] == [
            os.path.realpath(pictures / note.ref.path) for note in expected
        ]


def test_pictures_of_a_table_become_captioned_files(pictures: Path, model: Path) -> None:
    """The hub's usual form of captioned pictures, as captions and as conversations."""
    rows = [
        {"image": {"bytes": (pictures / name).read_bytes(), "path": None}, "text": name} for name in ("a.png", "c.jpg")
    ]
    parquet.write_table(pa.Table.from_pylist(rows), pictures / "rows.parquet")
    assert convert(pictures / "rows.parquet", "--output", pictures / "new") == 0
    found = annotations_of(pictures / "new/train.jsonl")
    assert [note.captions for note in found] == [("a.png",), ("c.jpg",)]
    for note, name in zip(found, ("a.png", "c.jpg"), strict=True):
        assert note.ref.kind == "image"
        assert (pictures / "new" / note.ref.path).read_bytes() == (pictures / name).read_bytes()
    talks = pictures / "talks"
    words = ("--as", "conversations", "--prompt", "which file?")
    assert convert(pictures / "rows.parquet", "--output", talks, *words) == 0
    expected = [talk("<image>\nwhich file?", name, images=[name]) for name in ("a.png", "c.jpg")]
    theirs = samples(model, write_rows(pictures, expected), str(pictures))
    assert_same_samples(samples(model, "train.jsonl", str(talks)), theirs)


@pytest.fixture
def coco(pictures: Path) -> Callable[..., str]:
    """`coco(annotations)` writes COCO's file over three pictures, one more than is described; returns its path."""
    (pictures / "train2017").mkdir()
    (pictures / "annotations").mkdir()
    for name in ("a.png", "b.png", "c.jpg"):
        os.rename(pictures / name, pictures / "train2017" / name)

    def write(annotations: list[dict[str, Any]]) -> str:
        content = {
            "info": {"contributors": [{"name": "]{"}]},
            "annotations": annotations,
            "images": [
                {"id": 7, "file_name": "a.png", "width": 28, "height": 28},
                {"id": 3, "file_name": "b.png", "width": 84, "height": 56},
                {"id": 5, "file_name": "c.jpg", "width": 40, "height": 120},
            ],
            "categories": [{"id": 1, "name": "cat"}, {"id": 18, "name": "dog"}],
        }
        path = pictures / "annotations/some_train2017.json"
        path.write_text(json.dumps(content))
        return str(path)

    return write


def test_captions_of_coco(coco: Callable[..., str], pictures: Path, model: Path) -> None:
    said = [(3, 'a "green" [box'), (7, "red"), (3, "grass"), (5, "sky")]
    source = coco([{"id": n, "image_id": image, "caption": text} for n, (image, text) in enumerate(said)])
    assert convert(source, "--output", pictures / "captions", "--as", "captions") == 0
    found = [
        (Path(note.ref.path).name, note.captions, note.width)
        for note in annotations_of(pictures / "captions/train.jsonl")
    ]
    assert found == [("a.png", ("red",), 28), ("b.png", ('a "green" [box', "grass"), 84), ("c.jpg", ("sky",), 40)]
    assert convert(source, "--output", pictures / "talks", "--prompt", "what?") == 0
    pairs = [("a.png", "red"), ("b.png", 'a "green" [box'), ("b.png", "grass"), ("c.jpg", "sky")]
    expected = [talk("<image>\nwhat?", text, images=[f"train2017/{name}"]) for name, text in pairs]
    theirs = samples(model, write_rows(pictures, expected), str(pictures))
    assert_same_samples(samples(model, "train.jsonl", str(pictures / "talks")), theirs)


@pytest.mark.parametrize(
    ("unit", "expected"),
    [
        ("pixels", [[[10, 0, 21, 56], "cat"], [[84, 28, 84, 56], "dog"]]),
        ("thousandths", [[[119, 0, 250, 1000], "cat"], [[994, 500, 1000, 1000], "dog"]]),
    ],
)
def test_boxes_of_coco(unit: str, expected: Any, coco: Callable[..., str], pictures: Path) -> None:
    boxes = [([10, 0, 11, 56], 1, 0), ([83.5, 28, 4, 28], 18, 0), ([0, 0, 1, 1], 1, 1)]
    rows = [{"image_id": 3, "bbox": box, "category_id": kind, "iscrowd": crowd, "segmentation": [[1, 2]]}
            for box, kind, crowd in boxes]  # fmt: skip
    assert convert(coco(rows), "--output", pictures / "new", "--boxes", unit) == 0
    (row,) = [json.loads(line) for line in (pictures / "new/train.jsonl").read_text().splitlines()]
    answer = json.loads(row["messages"][1]["content"])
    assert [[found["bbox_2d"], found["label"]] for found in answer] == expected
    assert unit in row["messages"][0]["content"] and row["images"] == ["../train2017/b.png"]


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "no such picture": (talk("<image>", "x", images=["no.png"]), "image not found", "no.png"),
    "counts": (talk("<image><image>", "x", images=["a.png"]), "placeholders and media don't match", "2 <image>"),
    "role": ({"messages": [{"role": "usr", "content": "x"}]}, "unknown role", "did you mean 'user'"),
    "no answer": (talk("x"), "no answer to train on", "no answer"),
    "no row": ([1], "a row can't be read", "expected an object"),  # type: ignore[dict-item]
    "network": (talk("<image>", "x", images=["https://a/b.png"]), "a medium is on the network", "download it"),
}


def test_bad_rows_are_counted_and_listed(pictures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [talk("good", "row"), *(row for row, _, _ in BAD.values())]
    (pictures / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = pictures / "new"
    assert convert(pictures / "rows.jsonl", "--output", output, "--strict") == 1
    assert not output.exists() and "nothing was written: 6 rows can't be used, and 1 can" in capsys.readouterr().out
    assert convert(pictures / "rows.jsonl", "--output", output) == 0
    printed = capsys.readouterr().out
    listed = (output / "left_out.txt").read_text().splitlines()
    for number, (name, (_, reason, said)) in enumerate(BAD.items(), start=2):
        line = listed[number - 2]
        assert f"rows.jsonl, line {number} (row {number})" in line and said in line, name
        assert f"left out: 1 × {reason}" in printed and line in printed, name
    assert (output / "train.jsonl").read_text().count("\n") == 1
    assert not [path for path in pictures.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    ("annotation", "said"),
    [
        ({"image_id": 4, "caption": "x"}, "annotations 2: 'image_id' is 4, and no image has this id"),
        ({"image_id": None, "caption": "x"}, "annotations 2: 'image_id' is None; expected a whole number"),
        ({"image_id": 7, "caption": 3}, "annotations 2: 'caption' is '3'; expected text"),
        (
            {"image_id": 7, "segments_info": []},
            "annotations 2: neither 'caption' nor 'bbox'; keys found: image_id, seg",
        ),
        ({"image_id": 7, "bbox": [1, 2, 0, 4], "category_id": 1}, "annotations 2: 'bbox' is [1, 2, 0, 4]; expected [x"),
        ({"image_id": 7, "bbox": [1, 2, 3, 4], "category_id": 2}, "annotations 2: 'category_id' is 2, and no category"),
        (
            {"image_id": 7, "bbox": [30, 2, 3, 4], "category_id": 1},
            "images 1: the box [30, 2, 3, 4] of 'cat' is outside",
        ),
    ],
)
def test_bad_annotations_of_coco(annotation: Any, said: str, coco: Callable[..., str], pictures: Path) -> None:
    source = coco([{"image_id": 3, "caption": "green"}, annotation, {"image_id": 5, "caption": "blue"}])
    assert convert(source, "--output", pictures / "new") == 0
    assert f"{source}, {said}" in (pictures / "new/left_out.txt").read_text()
    assert (pictures / "new/train.jsonl").read_text().count("\n") == 2


def test_rows_for_validation(pictures: Path) -> None:
    """Of rows without media those that val_rate takes; rows with the same image stay together."""
    source = write_rows(pictures, [talk(f"which {n}", "seven") for n in range(50)])
    assert convert(source, "--output", pictures / "new", "--validation", 0.2, "--seed", 7) == 0
    found = [json.loads(line) for line in (pictures / "new/validation.jsonl").read_text().splitlines()]
    _, expected = split_rows(np.arange(50), 0.2, 7)
    assert [row["messages"][0]["content"] for row in found] == [f"which {n}" for n in expected]
    for n in range(10):
        (pictures / f"{n}.png").write_bytes((pictures / "a.png").read_bytes())
    source = write_rows(pictures, [talk(f"<image>{n}", "x", images=[f"{n % 10}.png"]) for n in range(40)])
    assert convert(source, "--output", pictures / "images", "--validation", 0.3, "--media", "keep") == 0
    images = [
        {json.loads(line)["images"][0] for line in (pictures / f"images/{name}.jsonl").read_text().splitlines()}
        for name in ("train", "validation")
    ]
    assert not images[0] & images[1] and len(images[1]) == 3


def test_copies_of_two_folders_do_not_meet(pictures: Path) -> None:
    for folder, colour in (("one", "red"), ("two", "blue")):
        (pictures / folder).mkdir()
        Image.new("RGB", (28, 28), colour).save(pictures / folder / "same.png")
    paths = [str(pictures / folder / "same.png") for folder in ("one", "two", "one")]
    source = write_rows(pictures, [talk("<image>", "x", images=[path]) for path in paths])
    assert convert(source, "--output", pictures / "new", "--media", "copy") == 0
    rows = [json.loads(line) for line in (pictures / "new/train.jsonl").read_text().splitlines()]
    names = [row["images"][0] for row in rows]
    assert names[0] == names[2] == "media/same.png" != names[1]
    assert [(pictures / "new" / name).read_bytes() for name in names] == [Path(path).read_bytes() for path in paths]


def test_names_of_files_that_are_not_utf8(model: Path, pictures: Path) -> None:
    name = "a\udc80.png"
    os.rename(pictures / "a.png", pictures / name)
    source = write_rows(pictures, [talk("<image>which", "seven", images=[name])])
    expected = samples(model, source, str(pictures))
    for kind in ("jsonl", "json", "parquet"):
        assert convert(source, "--output", pictures / "new" / kind, "--to", kind) == 0
        assert_same_samples(samples(model, f"train.{kind}", str(pictures / "new" / kind)), expected)


def test_what_is_there_stays_unless_it_may_be_replaced(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, output = write_rows(pictures, [talk("a", "b", id=1)]), pictures / "new"
    output.mkdir()
    (output / "mine.txt").write_text("mine")
    assert convert(source, "--output", output, "--overwrite") == 1 and (output / "mine.txt").exists()
    (output / "mine.txt").unlink()
    assert convert(source, "--output", output) == 0
    before = (output / "train.jsonl").read_bytes()
    assert convert(source, "--output", output) == 1
    from mindspeed_mm.tools.convert_data.output import OutputFolder

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(OutputFolder, "_put_in_place", interrupted)
        convert(source, "--output", output, "--overwrite", "--keep", "id")
    assert (output / "train.jsonl").read_bytes() == before
    assert convert(source, "--output", output, "--overwrite", "--keep", "id") == 0
    assert json.loads((output / "train.jsonl").read_text())["id"] == 1
    assert sorted(path.name for path in pictures.iterdir() if path.name.startswith(".")) == []


@pytest.mark.parametrize(
    ("rows", "words", "said"),
    [
        ([{"q": "a"}], [], "the form of the rows isn't known; columns found: q"),
        ([talk("a", "b")], ["--as", "captions"], "holds conversations, which aren't captions"),
        ([talk("a", "b")], ["--from", "alpaca"], "the form of the rows isn't known; columns found: messages"),
        ([talk("a", "b")], ["--from", "coco"], "expected one object with the arrays 'images' and 'annotations'"),
        ([talk("a")], [], "no row of"),
        (
            [talk("a", "b", tools=[])],
            ["--keep", "messages"],
            "--keep messages: the new rows have a column of this name",
        ),
        ([talk("a", "b")], ["--validation", "0.1"], "--validation 0.1: "),
        ([talk("a", "b")], ["--validation", "2"], "expected a share between 0 and 1"),
        ([talk("a", "b")], ["--output", "."], "'.' is the current folder, or around it"),
    ],
)
def test_what_can_not_be_converted(
    rows: Any, words: list[str], said: str, pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(write_rows(pictures, rows), "--output", pictures / "new", *words) == 1
    assert said in capsys.readouterr().err
    assert not (pictures / "new").exists()


def test_a_cut_off_file_of_coco(coco: Callable[..., str], pictures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = Path(coco([{"image_id": 3, "caption": "green"}]))
    source.write_bytes(source.read_bytes()[:-20])
    assert convert(source, "--output", pictures / "new", "--from", "coco") == 1
    assert "the file ends inside an object; was it cut off while being written?" in capsys.readouterr().err
