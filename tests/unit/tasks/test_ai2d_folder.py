"""AI2D in the folder of its authors: questions, letters over labels, a known score, and what is missing."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mindspeed_mm.data.media.media import MediaRef
from mindspeed_mm.data.media.media_files import find_media
from mindspeed_mm.tasks.evaluation.benchmarks import all_benchmarks
from mindspeed_mm.tasks.evaluation.questions import BenchmarkQuestions
from mindspeed_mm.tasks.evaluation.report import report_of, score_rows
from mindspeed_mm.utils.errors import BadSample, DataError
from tests.support import benchmark_files as files

BENCHMARK = all_benchmarks()["ai2d"]


def pixels_of(content: bytes) -> np.ndarray:
    """[height, width, 3]"""
    return np.asarray(Image.open(io.BytesIO(content)))


def test_questions_of_the_test_split_and_their_score(tmp_path: Path) -> None:
    """An option that a question hasn't moves the letters; an image without questions and one of another split are
    left out."""
    rows = BenchmarkQuestions(BENCHMARK, str(files.ai2d_folder(tmp_path / "ai2d")))
    questions = [rows.question(index) for index in range(len(rows))]
    assert [question.id for question in questions] == ["0.png-0", "0.png-1", "1.png-2", "2.png-3", "3.png-4"]
    assert [question.target.references for question in questions] == [("A",), ("B",), ("C",), ("C",), ("A",)]
    assert questions[3].target.options == ("red", "green", "blue")
    scored = score_rows(rows, ["A. red", "b", "B", "C.", None], BENCHMARK.score)
    report = report_of(scored, BENCHMARK.score)
    assert report["score"] == 0.6
    assert report["categories"]["category"] == {"a": {"score": 1.0, "rows": 3}, "b": {"score": 0.0, "rows": 2}}


def test_letters_are_drawn_over_labels(tmp_path: Path) -> None:
    """Boxes of the published colour with a black letter each; a label without a height has none; all else is the
    picture as it is."""
    rows = BenchmarkQuestions(BENCHMARK, str(files.ai2d_folder(tmp_path)))
    plain, lettered = rows.question(0).parts[0], rows.question(1).parts[0]
    assert plain == MediaRef("image", "0.png")
    assert isinstance(lettered, MediaRef) and lettered.content is not None
    found, expected = pixels_of(lettered.content), pixels_of(files.picture(0))
    boxes = np.zeros(found.shape[:2], dtype=bool)
    for left, top, right, bottom in ((4, 4, 24, 20), (40, 30, 60, 50)):
        box = np.s_[top : bottom + 1, left : right + 1]
        boxes[box] = True
        frame = np.concatenate([found[box][0], found[box][:, 0], found[box][:, -1]])
        assert (frame == (25, 249, 255)).all()
        middle = (found[box] == 0).all(axis=2)
        assert 5 < middle.sum() < middle.size / 2
        across = np.flatnonzero(middle.any(axis=0))
        assert abs(across.mean() - (right - left) / 2) <= 2
    assert np.array_equal(found[~boxes], expected[~boxes])


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    folder = files.ai2d_folder(tmp_path)
    for number in (0, 1):
        (folder / "images" / f"{number}.png").unlink()
    rows = BenchmarkQuestions(BENCHMARK, str(folder / "questions" / "1.png.json"))
    with pytest.raises(BadSample, match=r"image not found: '1\.png'; looked for .*images/1\.png"):
        find_media(MediaRef("image", "1.png"), rows[0].folders, rows.where(0))
    rows = BenchmarkQuestions(BENCHMARK, str(folder))
    with pytest.raises(BadSample, match=r"0\.png\.json, questions\[1\]: image not found: looked for .*images/0\.png"):
        rows.question(1)
    file = folder / "questions" / "2.png.json"
    content = json.loads(file.read_text())
    content["questions"][files.question(3)]["correctAnswer"] = 1
    file.write_text(json.dumps(content))
    with pytest.raises(BadSample, match=r"2\.png\.json, questions\[0\]: 'correctAnswer' is 1, whose text is '{}'"):
        BenchmarkQuestions(BENCHMARK, str(file))
    (folder / "ai2d_test_ids.csv").unlink()
    with pytest.raises(DataError, match=r"ai2d_test_ids\.csv: not found; expected the file of AI2D's authors"):
        BenchmarkQuestions(BENCHMARK, str(folder))
    (folder / "ai2d_test_ids.csv").write_text("77\n9\n")
    with pytest.raises(DataError, match=r"none of its 2 images has questions in"):
        BenchmarkQuestions(BENCHMARK, str(folder))
