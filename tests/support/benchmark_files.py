"""Tiny files of benchmarks in the layouts in which they are published: five rows each, with pictures of their own."""

from __future__ import annotations

import base64
import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

ROWS = 5
SUBJECTS = ("Math", "Math", "Art_Theory", "History", "Math")


def picture(number: int) -> bytes:
    """A PNG file of 56 by 84 pixels, another one for each number."""
    pixels = np.random.RandomState(number).randint(0, 256, (56, 84, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()


def question(number: int) -> str:
    return f"what is in the picture, number {number}?"


def write_tsv(file: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """A tsv as VLMEvalKit publishes them: pictures in base64."""
    with open(file, "w", newline="", encoding="utf-8") as opened:
        writer = csv.DictWriter(opened, list(rows[0]), delimiter="\t", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return file


def write_parquet(file: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """A parquet file as Hugging Face's data sets have it: pictures as {bytes, path}."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    file.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist([dict(row) for row in rows]), file)
    return file


def _encoded(number: int) -> str:
    return base64.b64encode(picture(number)).decode()


def _stored(number: int) -> dict[str, Any]:
    return {"bytes": picture(number), "path": f"{number}.png"}


def ai2d_tsv(folder: Path) -> Path:
    """The last row has the index of the first one in the place of its picture."""
    rows: list[dict[str, Any]] = [
        {"index": n, "image": _encoded(n), "question": question(n), "answer": "ABCDA"[n]}
        | {"A": "red", "B": "green", "C": "blue", "D": "a line", "category": "ab"[n % 2]}
        for n in range(ROWS)
    ]
    rows[-1]["image"] = "0"
    return write_tsv(folder / "AI2D_TEST.tsv", rows)


def ai2d_parquet(folder: Path) -> Path:
    options = ["red", "green", "blue", "a line"]
    rows = [
        {"question": question(n), "options": options, "answer": str(n % 4), "image": _stored(n)} for n in range(ROWS)
    ]
    rows[-1]["image"] = _stored(0)
    return write_parquet(folder / "data" / "test-00000-of-00001.parquet", rows)


def ai2d_folder(folder: Path) -> Path:
    """The authors' files: two questions about picture 0, of which the second asks for letters that are drawn over its
    labels, one about each of 1 to 3; 8 is of another split, 9 has none. Row 3 has three options."""
    for name in ("images", "annotations", "questions"):
        (folder / name).mkdir(parents=True)
    options = ["red", "green", "blue", "a line"]
    of_image: dict[int, dict[str, Any]] = {number: {} for number in (0, 1, 2, 3, 8, 9)}
    for n, image in enumerate([0, 0, 1, 2, 3, 8]):
        of_image[image][question(n)] = {
            "abcLabel": n == 1,
            "answerTexts": ["red", "{}", "green", "blue"] if n == 3 else options,
            "correctAnswer": n % 4,
            "questionId": f"{image}.png-{n}",
        }
    for number, questions in of_image.items():
        name = f"{number}.png"
        (folder / "images" / name).write_bytes(picture(number))
        content = {"imageName": name, "questions": questions}
        (folder / "questions" / f"{name}.json").write_text(json.dumps(content))
        labels = {
            "T0": {"rectangle": [[4, 4], [24, 20]], "replacementText": "A", "value": "x"},
            "T1": {"rectangle": [[40, 30], [60, 50]], "replacementText": "B", "value": "y"},
            "T2": {"rectangle": [[9, 30], [12, 30]], "replacementText": "C", "value": "z"},
        }
        (folder / "annotations" / f"{name}.json").write_text(json.dumps({"imageName": name, "text": labels}))
    (folder / "categories.json").write_text(json.dumps({f"{number}.png": "ab"[number % 2] for number in of_image}))
    (folder / "ai2d_test_ids.csv").write_text("0\n1\n2\n3\n9\n")
    return folder


def chartqa_tsv(folder: Path) -> Path:
    rows = [
        {"index": n, "image": _encoded(n), "question": question(n), "answer": ["14", "Yes", "['0.5']", "3%", "0"][n]}
        | {"split": "test_human" if n % 2 else "test_augmented"}
        for n in range(ROWS)
    ]
    return write_tsv(folder / "ChartQA_TEST.tsv", rows)


def chartqa_json(folder: Path) -> Path:
    """The two files of its authors, with pictures in `png`."""
    (folder / "png").mkdir(parents=True)
    answers = ["14", "Yes", "0.5", "3%", "0"]
    for name, numbers in (("augmented", (0, 2, 4)), ("human", (1, 3))):
        for n in numbers:
            (folder / "png" / f"{n}.png").write_bytes(picture(n))
        rows = [{"imgname": f"{n}.png", "query": question(n), "label": answers[n]} for n in numbers]
        (folder / f"test_{name}.json").write_text(json.dumps(rows))
    return folder


def docvqa_tsv(folder: Path) -> Path:
    rows = [
        {"index": n, "image": _encoded(n), "question": question(n), "answer": repr([f"page {n}", "three"])}
        for n in range(ROWS)
    ]
    return write_tsv(folder / "DocVQA_VAL.tsv", rows)


def docvqa_json(folder: Path) -> Path:
    """The file of its authors: an object with the list of rows."""
    (folder / "documents").mkdir(parents=True)
    rows = []
    for n in range(ROWS):
        (folder / "documents" / f"{n}.png").write_bytes(picture(n))
        rows.append({"questionId": n, "question": question(n), "image": f"documents/{n}.png"})
        rows[-1] |= {"question_types": ["form"], "answers": [f"page {n}", "three"]}
    file = folder / "val_v1.0_withQT.json"
    file.write_text(json.dumps({"dataset_name": "SP-DocVQA", "dataset_split": "val", "data": rows}))
    return file


def mmmu_parquet(folder: Path) -> Path:
    """A folder for each subject; the second row has two pictures, the last one of Math has no options."""
    rows = []
    for n in range(ROWS):
        text = "<image 1> and <image 2>: what is it?" if n == 1 else f"{question(n)} <image 1>"
        rows.append(
            {"id": f"validation_{SUBJECTS[n]}_{n}", "question": text, "answer": "three" if n == 4 else "ABCD"[n]}
            | {"options": "[]" if n == 4 else "['red', 'green', 'blue', 'a line']"}
            | {"question_type": "open" if n == 4 else "multiple-choice", "image_1": _stored(n)}
            | {"image_2": _stored(7) if n == 1 else None}
        )
    for subject in dict.fromkeys(SUBJECTS):
        own = [row for row, of in zip(rows, SUBJECTS, strict=True) if of == subject]
        write_parquet(folder / subject / "validation-00000-of-00001.parquet", own)
        write_parquet(folder / subject / "test-00000-of-00001.parquet", own)
    return folder


def mmmu_tsv(folder: Path) -> Path:
    rows = []
    for n in range(ROWS):
        pictures = repr([_encoded(1), _encoded(7)]) if n == 1 else _encoded(n)
        text = "<image 1> and <image 2>: what is it?" if n == 1 else f"{question(n)} <image 1>"
        rows.append(
            {"index": n, "image": pictures, "question": text, "A": "red", "B": "green", "C": "blue", "D": ""}
            | {"answer": "ABCAB"[n], "category": SUBJECTS[n], "split": "validation" if n else "dev"}
        )
    return write_tsv(folder / "MMMU_DEV_VAL.tsv", rows)
