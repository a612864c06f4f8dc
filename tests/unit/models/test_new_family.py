"""A family added as a folder, in a place of its own, is found without an edit anywhere."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mindspeed_mm.models.transformers as package
from mindspeed_mm.models.common import families
from mindspeed_mm.models.common.base_model import FSDP2Mixin
from mindspeed_mm.models.common.families import find_family
from mindspeed_mm.models.common.family import FamilyTraits
from mindspeed_mm.models.common.modelzoo import ModelHub
from mindspeed_mm.models.transformers.adapters import find_adapter
from mindspeed_mm.models.transformers_model import TransformersModel
from mindspeed_mm.utils.errors import ConfigError
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


def test_records_are_read_without_torch() -> None:
    """So that model.json can be checked before anything that takes long is imported."""
    code = (
        "import sys\n"
        "from mindspeed_mm.models.common.families import family_folders, find_family\n"
        "records = [find_family(name) for name in family_folders()]\n"
        "structures = [family.megatron_form.structure for family in records if family.megatron]\n"
        "print(len(records), len(structures), {'torch', 'transformers', 'megatron'} & set(sys.modules))\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.split() == [str(len(ModelHub.families())), "3", "set()"]


def test_what_records_name_is_there() -> None:
    for name in ModelHub.families():
        family = find_family(name)
        assert family is not None
        assert issubclass(family.model_class, FSDP2Mixin)
        assert isinstance(family.model_class.traits, FamilyTraits)  # type: ignore[attr-defined]
        assert (family.data_adapter is None) == (family.adapter is None)


def test_a_name_belongs_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class of the user's own takes the folder's place, and keeps its rows; two of them can't have one name."""
    monkeypatch.setattr(families, "REGISTERED_CLASSES", {})
    monkeypatch.setattr(families, "_REGISTERED", {})

    class Own(ModelHub.find("qwen3_vl")):  # type: ignore[misc]
        pass

    ModelHub.register("qwen3_vl", Own)
    family = find_family("qwen3_vl")
    assert family is not None and family.model_class is Own
    assert type(family.data_adapter).__name__ == "TimedVideoAdapter"
    with pytest.raises(ConfigError, match=r"model_id 'qwen3_vl' is registered already, by .*Own"):
        ModelHub.register("qwen3_vl", families.Family("transformers:LlamaForCausalLM"))
    ModelHub.register("own_llama", families.Family("transformers:LlamaForCausalLM", traits=families.TEXT))
    assert ModelHub.find("own_llama") is not ModelHub.find("llama")
    with pytest.raises(ConfigError, match=r"model_id 'own_llama' is registered already, by transformers:Llama"):
        ModelHub.register("own_llama")(Own)
