"""scripts/test_lowest.sh names tests that there are: pytest takes a name of none without a word."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = (ROOT / "scripts/test_lowest.sh").read_text(encoding="utf-8")
LEFT_OUT = re.findall(r'^    "(tests/[^"]+)"$', SCRIPT, re.MULTILINE)


def test_something_is_left_out() -> None:
    assert len(LEFT_OUT) > 10 and SCRIPT.count('"tests/') == len(LEFT_OUT)


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_is_left_out_is_there(name: str) -> None:
    file, _, test = name.partition("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert not test or test.partition("[")[0] in functions


def test_folders_are_there() -> None:
    folders = re.findall(r"(?<= )tests/[a-z0-9/_]+(?=[ \n])", SCRIPT.rpartition("--dist loadfile")[2])
    assert len(folders) > 5 and all((ROOT / folder).is_dir() for folder in folders)


@pytest.mark.full
def test_rows_are_there() -> None:
    """pytest itself knows each row of a table that is left out."""
    rows = [name for name in LEFT_OUT if name.endswith("]")]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "full or not full", *rows]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert found.returncode == 0 and all(row in found.stdout.splitlines() for row in rows), found.stdout + found.stderr
