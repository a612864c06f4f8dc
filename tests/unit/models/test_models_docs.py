"""docs/models.md is made from the registry."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from mindspeed_mm.models.common.modelzoo import ModelHub
from tests.support.families import families

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "make_models_docs.py"


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_models_docs", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(maker: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert maker.main(["--check"]) == 0, capsys.readouterr().out


def test_the_page_names_every_family(maker: ModuleType) -> None:
    """And says of each what its test says: whether it packs, which sizes are held."""
    for name in ModelHub.families():
        row = maker.row(name)
        assert row[1] == f"`{name}`" and all(row[:4])
        if name in families():
            assert (row[4] == "yes") == families()[name].packs
            assert row[5] == ", ".join(families()[name].published)
