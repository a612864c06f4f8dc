"""The files at the top of the repository hand on to the package's entry scripts."""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path

import pytest

from mindspeed_mm.tasks.train.generation import SORA
from mindspeed_mm.tasks.train.language import TRANSFORMERS, VLM

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(file.stem for file in (ROOT / "mindspeed_mm" / "entry").glob("[a-z]*.py"))
#: those that aren't at the top
PLACES = {"trainer": "mindspeed_mm/fsdp/train/trainer.py"}
CALLBACKS = {"model_provider", "get_batch", "loss_func", "forward_step", "train_valid_test_datasets_provider"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_file_that_published_launches_call_is_the_entry_script_of_the_package(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = importlib.import_module(f"mindspeed_mm.entry.{name}")
    recipes = {"pretrain_vlm": VLM, "pretrain_transformers": TRANSFORMERS, "pretrain_sora": SORA}
    called = []
    monkeypatch.setattr(entry, "main", lambda: called.append(name))
    monkeypatch.setattr(sys, "path", [*sys.path])
    there = runpy.run_path(str(ROOT / PLACES.get(name, f"{name}.py")), run_name="__main__")
    assert called == [name]
    if name in recipes:
        recipe = recipes[name]
        assert (there["model_provider"], there["forward_step"]) == (recipe.model, recipe.forward_step)
        assert there["train_valid_test_datasets_provider"] is recipe.data and there.keys() >= CALLBACKS
