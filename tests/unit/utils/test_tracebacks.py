"""An exception of a user's code is one sentence that names its place, and a file with its traceback."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from torch.utils.data import DataLoader

from mindspeed_mm.configs.environment import TO_FILES, TRACEBACKS
from mindspeed_mm.launch import errors_as_sentences
from mindspeed_mm.tools.train.script import run_script
from mindspeed_mm.utils.tracebacks import sentence_with_file

CODE = """
import json

def shapes():
    raise RuntimeError("the shapes\\ndon't fit")

def through_a_library():
    json.loads("{")

class Rows:
    def __len__(self):
        return 2

    def __getitem__(self, index):
        raise KeyError("no such row") if index else ValueError(f"bad row {index}")
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A user's code in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "3")
    (tmp_path / "mine.py").write_text(CODE)
    spec = importlib.util.spec_from_file_location("mine", tmp_path / "mine.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def caught(call: object) -> Exception:
    with pytest.raises(Exception) as found:
        call()  # type: ignore[operator]
    return found.value


def test_the_sentence_names_the_users_line_and_the_file(mine: ModuleType, tmp_path: Path) -> None:
    workers = iter(DataLoader(mine.Rows(), num_workers=1))
    cases = [
        (mine.shapes, "RuntimeError: the shapes (mine.py, line 5, in shapes)"),
        (mine.through_a_library, "JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 "
         "(char 1) (mine.py, line 8, in through_a_library)"),
        (lambda: next(workers), "ValueError: bad row 0 (mine.py, line 15, in __getitem__)"),
        (lambda: next(workers), "KeyError: 'no such row' (mine.py, line 15, in __getitem__)"),
    ]  # fmt: skip
    file = tmp_path / "runs/one/traceback-rank3.txt"
    for call, sentence in cases:
        error = caught(call)
        first, second = sentence_with_file(error, str(file.parent)).splitlines()
        assert first == sentence
        assert second == f"its traceback is in '{file}'; mindspeed-mm train --traceback … shows it here"
        assert "Traceback (most recent call last)" in file.read_text() and 'mine.py", line ' in file.read_text()
        assert str(error).splitlines()[-1] in file.read_text()


def test_without_a_run_folder_the_file_is_a_temporary_one(
    mine: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = caught(mine.shapes)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    (tmp_path / "file").touch()
    for folder in (None, str(tmp_path / "file/run")):
        (found,) = tmp_path.glob("*traceback*") if (said := sentence_with_file(error, folder)) else ()
        assert str(found) in said
        found.unlink()
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "file"))
    assert "Traceback (most recent call last)" in sentence_with_file(error, None)


def test_a_process_of_mindspeed_mm_train_shows_no_traceback(
    mine: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "3").mkdir()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "3/error.json"))
    monkeypatch.setenv(TRACEBACKS, TO_FILES)
    monkeypatch.setattr("mindspeed_mm.launch._outlive_peers", lambda: None)
    with pytest.raises(SystemExit, match="1"), errors_as_sentences() as report:
        report.folder = str(tmp_path)
        mine.shapes()
    first, second = capfd.readouterr().err.strip().splitlines()
    assert first == "RuntimeError: the shapes (mine.py, line 5, in shapes)" and str(tmp_path) in second
    error = json.loads((tmp_path / "3/error.json").read_text())["message"]["message"]
    assert error == "RuntimeError: the shapes\ndon't fit"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import sys\nimport nowhere", "ModuleNotFoundError: No module named 'nowhere' (mine.py, line 2, in <module>)"),
        ("def f(:", "SyntaxError: invalid syntax (mine.py, line 1)"),
        ("import sys, beside\nassert sys.modules['__main__'].__file__ == 'mine.py'", ""),
    ],
)
def test_a_script_that_fails_by_itself(
    code: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Before it calls `pretrain`; modules beside it are found, as Python finds them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setenv(TRACEBACKS, TO_FILES)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr("mindspeed_mm.launch._outlive_peers", lambda: None)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    (tmp_path / "mine.py").write_text(code)
    (tmp_path / "beside.py").touch()
    with pytest.raises(SystemExit, match="1") if said else contextlib.nullcontext():
        run_script("mine.py")
    assert [line for line in capfd.readouterr().err.splitlines() if line][:1] == ([said] if said else [])
