"""A version that can't carry a run is told in a sentence before the run: too old, or built for another torch."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch.distributed.fsdp import FSDPModule

from mindspeed_mm import accelerator
from mindspeed_mm.configs.describe import describe
from mindspeed_mm.models.common.families import find_family, require_megatron_form
from mindspeed_mm.models.common.family import FamilyTraits
from mindspeed_mm.models.common.idle_tower import Tower
from mindspeed_mm.models.transformers.inferred import guard_idle_encoders
from mindspeed_mm.tools import doctor
from mindspeed_mm.utils import torch_import
from mindspeed_mm.utils.errors import ConfigError, MMError
from mindspeed_mm.utils.versions import MINIMUM, check_versions, release, version_faults
from tests.support.runs import OWN

ROOT = Path(__file__).resolve().parents[3]


Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Let a package of a name, a version and a requirement be the installed one."""
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, version: str, requires: str = "") -> None:
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        needed = f"Requires-Dist: {requires}\n" if requires else ""
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needed}")
        importlib.invalidate_caches()

    return write


def test_what_is_installed_here_carries_a_run() -> None:
    check_versions()


@pytest.mark.parametrize(
    "package, sentence",
    [
        (("torch", "2.7.1"), r"torch 2\.7\.1 is installed and torch >= 2\.8 is needed: FSDP2 .*install 'torch>=2\.8'"),
        (("transformers", "5.9.2"), r"transformers 5\.9\.2 is installed and transformers >= 5\.17 is needed"),
        (
            ("torchvision", "0.21.0", "torch==2.6.0"),
            r"torchvision 0\.21\.0 is built for torch 2\.6\.0 and torch 2\S+ is installed.*torch==2\.6\.0 torchv",
        ),
        (
            ("torch_npu", "2.6.0.post3", "torch==2.6.0.*"),
            r"torch_npu 2\.6\.0\.post3 is built for torch 2\.6\.0 and torch 2\S+ is installed",
        ),
        (("torch_npu", "2.6.0", "torch==2.6.0+cpu ; platform_machine == 'x86_64'"), r"torch_npu 2\.6\.0 is built for"),
    ],
)
def test_a_version_that_does_not_fit_is_a_sentence(install: Install, package: tuple[str, ...], sentence: str) -> None:
    install(*package)
    with pytest.raises(ConfigError, match=sentence) as raised:
        describe([], OWN)
    assert "\n" not in str(raised.value)
    assert doctor.general_problems(accelerator.current())[0] in str(raised.value)


@pytest.mark.parametrize(
    "packages",
    [
        [("torch", "2.8.0a0+nv25.6"), ("torchvision", "0.23.0a0")],
        [("torch", "2.14.0+cpu"), ("torchvision", "0.29", "torch==2.14.0"), ("torch_npu", "2.14.0", "torch==2.14.0.*")],
        [("torch", "3.0.1"), ("torchvision", "1.0", "torch==3.0.1"), ("transformers", "6.0.0")],
    ],
    ids=["lowest", "ascend", "newer"],
)
def test_versions_that_fit_are_not_refused(install: Install, packages: list[tuple[str, ...]]) -> None:
    for package in packages:
        install(*package)
    assert version_faults() == []


def test_a_family_that_needs_a_newer_transformers_says_so(install: Install) -> None:
    install("transformers", "5.22.2")
    assert version_faults() == []
    sentence = r"Qwen2\.5-Omni and Qwen3-Omni: transformers 5\.22\.2 is installed and transformers >= 5\.23 is needed: "
    for name in ("qwen2_5_omni", "qwen3_omni_moe_thinker"):
        found = find_family(name)
        assert found is not None
        family = replace(found)  # which has loaded nothing yet
        with pytest.raises(ConfigError, match=sentence):
            _ = family.model_class
        with pytest.raises(ConfigError, match=sentence):
            _ = family.data_adapter


def test_a_family_that_needs_a_newer_transformers_is_not_in_the_way_of_others(
    install: Install,
) -> None:
    install("transformers", "5.22.2")
    assert require_megatron_form("qwen3").decoder == "model."
    with pytest.raises(ConfigError, match=r"'gemma3' has no .* have one: qwen2, qwen2_5_vl, qwen3; others train"):
        require_megatron_form("gemma3")


@pytest.mark.parametrize("import_it", [torch_import.import_torch, torch_import.import_torch_and_transformers])
def test_torch_npu_beside_another_torch_is_told_first(
    import_it: Callable[[], Any], install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("torch_npu", "2.6.0", "torch==2.6.0")
    with pytest.raises(MMError, match=r"built for torch 2\.6\.0 .*TORCH_DEVICE_BACKEND_AUTOLOAD=0"):
        import_it()
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    import_it()
    assert version_faults() == []


def test_the_lowest_versions_are_those_that_the_package_declares() -> None:
    declared = dict(re.findall(r'"(torch|transformers)>=([\d.]+)', (ROOT / "pyproject.toml").read_text()))
    assert declared == {name: lowest for name, (lowest, _) in MINIMUM.items()}


def test_numbers_of_versions() -> None:
    assert release("2.10.0+cu130") == (2, 10) > release("2.9.1") > release("2.9.0.post2") == (2, 9)


def test_an_unknown_encoder_needs_a_torch_that_fills_up_with_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(FSDPModule, "set_reduce_scatter_unused_params", raising=False)
    traits = FamilyTraits(towers=(Tower("model.vision", ("image",), (), None),))
    with pytest.raises(ConfigError, match=r"torch >= 2\.13 is needed to train .*'model\.vision'.* without a family"):
        guard_idle_encoders(mock.Mock(spec=FSDPModule), traits)
