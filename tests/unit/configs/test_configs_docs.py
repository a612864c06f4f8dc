"""docs/configuration.md is made from the schema and says all of it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from mindspeed_mm.configs.data_config import DataConfig
from mindspeed_mm.configs.environment import VARIABLES
from mindspeed_mm.configs.flags import GROUPS
from mindspeed_mm.configs.flags.spec import all_flags
from mindspeed_mm.configs.fsdp2_config import Fsdp2Config
from mindspeed_mm.configs.generation_data import GenerationDataConfig
from mindspeed_mm.configs.model_config import TransformersModelConfig
from mindspeed_mm.configs.sections import key_paths
from mindspeed_mm.configs.sora_config import SoRAModelConfig
from mindspeed_mm.configs.tools_config import ToolsConfig
from mindspeed_mm.configs.vlm_config import VLMModelConfig

SCHEMAS = (
    *(Fsdp2Config, DataConfig, TransformersModelConfig, VLMModelConfig),
    *(SoRAModelConfig, GenerationDataConfig, ToolsConfig),
)
SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "make_configuration_docs.py"


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_configuration_docs", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(maker: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert maker.main(["--check"]) == 0, capsys.readouterr().out


def test_the_page_names_everything(maker: ModuleType) -> None:
    page = maker.make_page()
    for item in all_flags(GROUPS):
        assert f"`{item.spelling}`" in page
    for cls in SCHEMAS:
        for path in key_paths(cls):
            assert f"`{path}`" in page
    for name in VARIABLES:
        assert f"`{name}`" in page


def test_every_key_and_flag_is_explained() -> None:
    for item in all_flags(GROUPS):
        assert item.help
    for cls in SCHEMAS:
        for name, info in cls.model_fields.items():
            assert info.description, f"{cls.__name__}.{name}"
