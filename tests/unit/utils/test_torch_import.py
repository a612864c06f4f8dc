"""torch and transformers are imported side by side, in the order that each needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mindspeed_mm.utils import torch_import
from mindspeed_mm.utils.torch_import import _load_libraries

ROOT = Path(__file__).resolve().parents[3]

IN_A_NEW_PROCESS = """
import importlib.util, pathlib, sys, threading
from mindspeed_mm.utils import torch_import

def checked(import_torch=torch_import.import_torch):
    assert {"transformers.models", "sympy"} <= sys.modules.keys() and "torch" not in sys.modules
    (folder,) = importlib.util.find_spec("torch").submodule_search_locations
    installed = [p.name for p in pathlib.Path(folder, "lib").glob("libtorch_c*.so") if p.stem[8:] in ("_cpu", "_cuda")]
    with open("/proc/self/maps") as maps:
        loaded = maps.read()
    assert "libtorch_cpu.so" in installed and all(name in loaded for name in installed)
    assert threading.active_count() == 1
    return import_torch()

torch_import.import_torch = checked
torch = torch_import.import_torch_and_transformers()
assert torch is sys.modules["torch"] and torch.ones(3).sum() == 3
"""


@pytest.mark.skipif(sys.platform != "linux", reason="libraries are loaded early on Linux")
def test_libraries_are_loaded_before_torch_is_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IN_A_NEW_PROCESS], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_an_imported_torch_is_returned_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_import, "_load_libraries", pytest.fail)
    assert torch_import.import_torch_and_transformers() is sys.modules["torch"]


def test_libraries_that_do_not_load_are_left_to_the_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None installed, no such files, and files that are no libraries."""
    (broken := tmp_path / "broken" / "lib").mkdir(parents=True)
    for name in ("libtorch_global_deps.so", "libtorch_cpu.so", "libtorch_cuda.so"):
        (broken / name).write_text("cut off")
    for folders in (None, [str(tmp_path / "none")], [str(broken.parent)]):
        spec = None if folders is None else SimpleNamespace(submodule_search_locations=folders)
        monkeypatch.setattr(torch_import.importlib.util, "find_spec", lambda name, spec=spec: spec)
        _load_libraries()
