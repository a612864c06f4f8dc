"""scripts/npu_contract.py finds a name, an argument or an operator that the torch_npu wheel lacks, and only such."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "npu_contract.py"
SCHEMA = "npu_swiglu(Tensor self, int dim=-1) -> Tensor"
FUSED = "_fused_adamw_(Tensor(a!)[] self, Tensor(b!)[] grads, *, float lr, Tensor? found_inf=None) -> ()"
FILES = {
    "torch_npu/__init__.py": "from torch_npu._init import load\nload()\n",
    "torch_npu/npu/__init__.py": (
        "from .utils import set_device, synchronize as wait\nfrom .streams import *\nfrom . import memory\n"
        "try:\n    def device_count() -> int: ...\nexcept ImportError:\n    pass\nconfig = object()\n"
    ),
    "torch_npu/npu/utils.py": "def set_device(device): ...\ndef synchronize(device=None): ...\n",
    "torch_npu/npu/streams.py": (
        "class Stream:\n    def __init__(self, device=None, priority=0): ...\n    def query(self): ...\n"
    ),
    "torch_npu/npu/memory.py": (
        "def _record(enabled='all', *args, **kwargs):\n    return _record_impl(enabled, *args, **kwargs)\n"
        "def _record_impl(enabled='all', *, stacks='all', max_entries=0): ...\n"
    ),
    "torch_npu/csrc/npu_native_functions_by_codegen.yaml": (
        f'custom:\n- func: {SCHEMA}\n  exposed: true\n- func: "{FUSED}"\nsupported: [copy_]\n'
    ),
}
HEAD = (
    "import torch\nimport torch_npu\nclass A:\n    def __init__(self):\n        self._npu = torch_npu.npu\n"
    "    def f(self, x):\n"
)


@pytest.fixture(scope="module")
def contract() -> ModuleType:
    spec = importlib.util.spec_from_file_location("npu_contract", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["npu_contract"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def faults(contract: Any, folder: Path, line: str) -> list[str]:
    (folder / "accelerator").mkdir()
    (folder / "accelerator" / "npu.py").write_text(f"{HEAD}        {line}\n")
    return contract.faults_of(contract.uses_in(folder), contract.Wheel(FILES))


@pytest.mark.parametrize(
    "line",
    [
        "self._npu.set_device(x)",
        "self._npu.wait()",
        "torch.npu.device_count()",
        "torch_npu.npu.Stream(priority=1).query()",
        "self._npu.memory._record(stacks='all', max_entries=x)",
        "self._npu.config.anything(x)",
        "torch_npu.npu_swiglu(x, dim=1); torch.ops.npu.npu_swiglu(x)",
        "torch._fused_adamw_(x, x, lr=1.0); torch._foreach_add_(x, 1.0)",
    ],
)
def test_what_the_wheel_has_passes(contract: Any, tmp_path: Path, line: str) -> None:
    assert faults(contract, tmp_path, line) == []


@pytest.mark.parametrize(
    "line, said",
    [
        (
            "self._npu.set_devise(x)",
            "npu.py:7: torch_npu.npu.set_devise: there is no such name; the nearest are set_d",
        ),
        ("torch.npu.memory._recorded", "there is no such name; the nearest are _record"),
        ("torch_npu.npu.Stream.ask", "there is no such name"),
        ("self._npu.set_device()", "argument 'device' is missing: set_device(device)"),
        ("self._npu.set_device(x, x)", "2 arguments by place, and it takes 1"),
        ("self._npu.wait(queue=x)", "it takes no argument 'queue': synchronize(device=None)"),
        ("torch_npu.npu.Stream(prio=1)", "it takes no argument 'prio'"),
        ("self._npu.memory._record(stack='all')", "it takes no argument 'stack'"),
        ("torch_npu.npu_swiglu(x, axis=1)", f"it takes no argument 'axis': {SCHEMA}"),
        ("torch_npu.npu_swiglu()", "argument 'self' is missing"),
        ("torch.ops.npu.npu_swigul(x)", "there is no such operator; the nearest are npu_swiglu"),
        ("torch._fused_adamw_(x, x)", "argument 'lr' is missing"),
        ("torch._fused_adagrad_(x)", "torch._fused_adagrad_: there is no kernel of it for the NPU"),
        ("k = torch._fused_adamw_ if x else torch._foreach_add_; k(x, x, lr=1, eps=0)", "it takes no argument 'eps'"),
    ],
)
def test_what_the_wheel_lacks_is_found(contract: Any, tmp_path: Path, line: str, said: str) -> None:
    (fault,) = faults(contract, tmp_path, line)
    assert said in fault


def test_every_use_of_the_package_is_seen(contract: Any) -> None:
    uses = contract.uses_in(contract.PACKAGE)
    names = {use.name for use in uses.names}
    assert {"torch_npu.npu.set_device", "torch_npu.npu.memory._dump_snapshot", "torch_npu.npu.is_available"} <= names
    assert {"torch._foreach_mul_", "torch._foreach_copy_"} <= {use.name for use in uses.operators}
    assert uses.unproved == {"mindspeed.megatron_adaptor"}
    assert {"torch_npu.npu.Stream", "torch_npu.npu.Event"} <= {use.name for use in contract.uses_of_fully_shard()}


def test_without_a_package_index_nothing_is_proved_and_that_is_said(
    contract: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(contract, "CACHE", tmp_path)
    said = "ERROR: Could not find a version that satisfies the requirement torch_npu==9 (from versions: none)"
    none = SimpleNamespace(stdout="", stderr=said)
    monkeypatch.setattr(contract, "fetch", lambda version, fetch=contract.fetch: fetch(version, lambda *a, **k: none))
    assert contract.main() == 0
    assert capsys.readouterr().out.startswith("NOT PROVED: no package index can be reached")
    none.stderr = said.replace("none", "2.13.0, 2.14.0")
    with pytest.raises(SystemExit, match="the package index has no torch_npu"):
        contract.main()
