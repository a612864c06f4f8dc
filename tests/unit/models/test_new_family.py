"""A family added as a folder, in a place of its own, is found without an edit anywhere."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import mindspeed_mm.models.transformers as package
from mindspeed_mm.models.common.modelzoo import ModelHub
from mindspeed_mm.models.transformers.adapters import find_adapter
from mindspeed_mm.models.transformers_model import TransformersModel
from tests.support.families.qwen3_vl import make


@pytest.fixture
def new_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A copy of Qwen3-VL's folder under another name and id, beside the package's own families."""
    source = Path(package.__path__[0]) / "qwen3_vl"
    folder = tmp_path / "families/our_vl"
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in folder.glob("*.py"):
        file.write_text(file.read_text(encoding="utf-8").replace('"qwen3_vl"', '"our_vl"'), encoding="utf-8")
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path / "families")])
    yield "our_vl"
    ModelHub.MODEL_MAPPINGS.pop("our_vl", None)


def test_a_folder_is_a_family(new_family: str, tmp_path: Path) -> None:
    """Its class, its traits and its data adapter are used for the model_id that the folder has."""
    hf_dir = make(tmp_path / "hf")
    assert new_family in ModelHub.families()
    description = {"init_from_hf_path": str(hf_dir), "model_id": new_family}
    model = TransformersModel(description)
    assert type(model.model).__mro__[0] is ModelHub.find(new_family)
    assert model.traits.towers[0].path == "model.visual"
    adapter = find_adapter(type("Model", (), description))
    assert type(adapter).__module__ == f"{package.__name__}.{new_family}.data"
    # and without the id, config.json's model_type still finds the package's own
    assert json.loads((hf_dir / "config.json").read_text())["model_type"] == "qwen3_vl"
    del description["model_id"]
    assert type(find_adapter(type("Model", (), description))).__module__ == f"{package.__name__}.qwen3_vl.data"
